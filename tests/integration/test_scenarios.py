"""The scenarios that a trustworthy server must pass, as a client sees them: reasoning, tool calls,
finish reasons, streams that agree with whole answers. A real gateway; the engine says what it is
told, token by token. Each test is named after its scenario and its number in docs/formats.md.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests

from engine_core.grammar.compiler import Compiler
from protocol.errors import ErrorInfo, InvalidRequest
from protocol.grammar import JsonSchema, Lark, Thinking, check_grammar
from protocol.messages import Generate
from tests.support.gateway_process import GatewayProcess
from tests.support.http import events_of, exchange, said_whole, spoken
from tests.support.scripted_engine import (
    EOS,
    Reply,
    Says,
    ScriptedEngine,
    marked_ids,
    says,
    text_of,
    thinking_card,
)

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", city={"type": "string"}), tool("now")]
WITH_TOOLS = {"messages": HI, "tools": TOOLS}


def call(name: str, arguments: Any) -> str:
    """A call as the model writes it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


COLOGNE = call("weather", {"city": "Köln"})


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    address = f"ipc://{tmp_path_factory.mktemp('engine') / 'engine.sock'}"
    with ScriptedEngine(address, card=thinking_card(), max_len=1 << 20) as engine:
        yield engine


@pytest.fixture(scope="module")
def gateway(engine: ScriptedEngine) -> Iterator[GatewayProcess]:
    with GatewayProcess(engine=engine.address, log_requests=False) as gateway:
        yield gateway.await_ready()


@pytest.fixture(autouse=True)
def _fresh(engine: ScriptedEngine) -> Iterator[None]:
    engine.generates.clear()
    yield
    engine.step_s = 0.0005
    engine.await_idle()


def streamed(gateway: GatewayProcess, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return spoken(stream(gateway, body))


def stream(gateway: GatewayProcess, body: dict[str, Any]) -> list[Any]:
    status, _, data = exchange(gateway.port, CHAT, {**body, "stream": True})
    assert status == 200, data
    return events_of(data)


def whole(gateway: GatewayProcess, body: dict[str, Any]) -> Any:
    response = gateway.post(CHAT, body)
    assert response.status_code == 200, response.text
    return response.json()


def without_ids(choices: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Ids of calls are drawn anew for each answer."""
    return {
        index: {**choice, "calls": [call[1:] for call in choice["calls"]]}
        for index, choice in choices.items()
    }


def both(gateway: GatewayProcess, body: dict[str, Any]) -> dict[str, Any]:
    """The one answer, which is the same streamed and whole."""
    told, at_once = streamed(gateway, body), said_whole(whole(gateway, body))
    assert without_ids(told) == without_ids(at_once)
    return without_ids(told)[0]


def answers(engine: ScriptedEngine, text: str, **options: Any) -> None:
    engine.script = lambda generate: says(text, marked=True, **options)


# ---- tool calls and streaming


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_1_however_the_tokens_are_cut_the_answer_is_the_same(
    size: int, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    text = f"<think>\nhm, {{}}\n</think>\n\nLet me see.\n\n{COLOGNE}\n{call('now', {})}"
    answers(engine, text, size=size)
    assert both(gateway, WITH_TOOLS) == {
        "content": "Let me see.",
        "reasoning": "hm, {}",
        "calls": [("weather", '{"city": "Köln"}'), ("now", "{}")],
        "finish": "tool_calls",
        "warnings": [],
    }


def test_2_three_calls_in_one_delta_are_three_calls(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    cities = ["Köln", "Oslo", "Rom"]
    answers(engine, "\n".join(call("weather", {"city": c}) for c in cities), size=10_000)
    calls = spoken(stream(gateway, WITH_TOOLS))[0]["calls"]
    assert [json.loads(arguments) for _, _, arguments in calls] == [{"city": c} for c in cities]
    assert len({call_id for call_id, _, _ in calls}) == 3


def test_3_a_delta_with_the_end_of_thinking_and_the_start_of_a_call_shows_no_tag(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    ids = marked_ids(f"<think>the end.</think>{COLOGNE}")
    at = ids.index(marked_ids("</think>")[0])
    engine.script = lambda generate: Says([ids[: at - 4], ids[at - 4 : at + 2], ids[at + 2 :]])
    answer = both(gateway, WITH_TOOLS)
    assert (answer["reasoning"], answer["content"]) == ("the end.", "")
    assert answer["calls"] == [("weather", '{"city": "Köln"}')]


def test_4_three_answers_interleaved_token_by_token_are_each_as_if_alone(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    texts = {
        5: f"<think>one</think>First.\n{call('weather', {'city': 'A' * 40})}",
        6: call("now", {}) + call("weather", {"city": '</tool_call> "quoted"'}),
        7: "<think>three</think>No call at all, but <tool_call",
    }

    def by_seed(generate: Generate) -> Says:
        return says(texts[generate.params.seed or 0], marked=True)

    engine.script = by_seed
    engine.step_s = 0.004
    events = stream(gateway, {**WITH_TOOLS, "n": 3, "seed": 5})
    engine.step_s = 0.0005
    together = without_ids(spoken(events))
    order = [event["choices"][0]["index"] for event in events]
    assert sum(a != b for a, b in itertools.pairwise(order)) > 50, "they interleave"
    for place, seed in enumerate(texts):
        assert together[place] == without_ids(streamed(gateway, {**WITH_TOOLS, "seed": seed}))[0]


def test_5_a_limit_inside_a_call_is_a_length_and_shows_no_markup(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    text = f"Wait. {call('weather', {'city': 'Rom'})}"
    answers(engine, text)
    ids = marked_ids(text)
    ends = ids.index(262)
    for limit in range(1, len(ids) + 2):
        answer = both(gateway, {**WITH_TOOLS, "max_tokens": limit})
        is_cut = limit <= len(ids)
        assert answer["finish"] == ("length" if is_cut else "tool_calls"), limit
        assert answer["content"].strip() == "Wait."[:limit], limit
        if not answer["calls"]:
            assert limit < ends
            continue
        ((name, arguments),) = answer["calls"]
        assert name == "weather"
        assert '{"city": "Rom"}'.startswith(arguments)


def test_6_a_required_call_that_is_not_made_is_a_stop_with_a_warning(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    answers(engine, "No, I will not.")
    body = {**WITH_TOOLS, "tool_choice": "required"}
    answer = both(gateway, body)
    assert (answer["finish"], answer["calls"]) == ("stop", [])
    assert answer["warnings"] == ["tool_choice_not_followed"]
    assert "tool_calls" not in whole(gateway, body)["choices"][0]["message"]


TRUTH: list[tuple[str, str, bool, str]] = [
    # tool_choice, calls completed, cut short, finish_reason
    ("auto", "none", False, "stop"),
    ("auto", "none", True, "length"),
    ("auto", "one", False, "tool_calls"),
    ("auto", "one", True, "length"),
    ("required", "none", False, "stop"),
    ("required", "none", True, "length"),
    ("required", "one", False, "tool_calls"),
    ("required", "one", True, "length"),
    ("named", "none", False, "stop"),
    ("named", "none", True, "length"),
    ("named", "one", False, "tool_calls"),
    ("named", "one", True, "length"),
    ("none", "none", False, "stop"),
    ("none", "none", True, "length"),
    ("none", "one", False, "stop"),
    ("none", "one", True, "length"),
]
"""The truth table of docs/formats.md; each row holds streamed and whole."""


@pytest.mark.parametrize(("choice", "calls", "is_cut", "reason"), TRUTH)
def test_7_the_finish_reason_is_that_of_the_published_table(
    choice: str,
    calls: str,
    is_cut: bool,
    reason: str,
    engine: ScriptedEngine,
    gateway: GatewayProcess,
) -> None:
    answers(engine, (COLOGNE if calls == "one" else "") + " and more")
    tool_choice: Any = choice
    if choice == "named":
        tool_choice = {"type": "function", "function": {"name": "weather"}}
    body = {**WITH_TOOLS, "tool_choice": tool_choice}
    if is_cut:
        body["max_tokens"] = len(marked_ids(COLOGNE)) + 3 if calls == "one" else 3
    answer = both(gateway, body)
    assert answer["finish"] == reason
    assert len(answer["calls"]) == (calls == "one" and choice != "none")


@pytest.mark.parametrize(
    "value",
    [
        "</tool_call>",
        "</parameter>",
        "<tool_call>",
        "}}",
        "\\n",
        '\\"',
        "👩‍👩‍👧‍👦 語",
        "\u2028",
        "\ud800",
        "def f(x):\n    return {'a': \"b\"}\n" * 3000,
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_8_whatever_stands_in_an_argument_arrives(
    value: str, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    """Markers in it are spelt by ordinary tokens: a model that writes the token itself means it."""
    head, tail = call("weather", {"city": "@"}).split("@")
    inner = json.dumps(value)[1:-1].encode()
    ids = [*marked_ids(head), *inner, *marked_ids(tail)]
    engine.script = lambda generate: Says([ids[at : at + 50] for at in range(0, len(ids), 50)])
    answer = both(gateway, WITH_TOOLS)
    ((_, arguments),) = answer["calls"]
    assert json.loads(arguments) == {"city": value}
    assert answer["content"] == ""


def test_9_a_call_without_arguments_has_an_empty_object(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    for text in ("{}", "null", ""):
        written = f', "arguments": {text}' if text else ""
        answers(engine, f'<tool_call>{{"name": "now"{written}}}</tool_call>')
        assert both(gateway, WITH_TOOLS)["calls"] == [("now", "{}")]


def test_10_empty_and_nested_values_keep_their_types(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    arguments: dict[str, Any] = {
        "a": {},
        "b": None,
        "c": 1.5,
        "d": [[1], []],
        "e": "",
        "f": True,
        "g": [{}],
    }
    answers(engine, call("weather", arguments), size=2)
    ((_, told),) = both(gateway, WITH_TOOLS)["calls"]
    assert json.loads(told) == arguments


def test_11_prose_that_mentions_the_tag_flows(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    text = "One writes <tool_call> and then JSON, or <tool_call as text."
    engine.script = lambda generate: says(text)  # spelt by ordinary tokens
    events = stream(gateway, WITH_TOOLS)
    bits = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(bits) == text
    assert max(map(len, bits)) <= 2, "a blank may wait for the next letter, nothing else does"


def test_12_arguments_that_are_no_json_are_told_as_they_are_with_a_warning(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    answers(engine, '<tool_call>{"name": "weather", "arguments": {"city": Köln}}</tool_call>')
    answer = both(gateway, WITH_TOOLS)
    assert answer["warnings"]
    assert "Köln" in answer["content"] + str(answer["calls"])
    answers(engine, "fine")
    assert both(gateway, WITH_TOOLS)["content"] == "fine"


def history(call_id: str | None, arguments: Any, answered: str | None) -> list[dict[str, Any]]:
    made: dict[str, Any] = {"type": "function", "function": {"name": "now", "arguments": arguments}}
    made |= {"id": call_id} if call_id else {}
    answer = {"role": "tool", "content": "12:00"} | ({"tool_call_id": answered} if answered else {})
    return [*HI, {"role": "assistant", "content": None, "tool_calls": [made]}, answer]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (history("a", "{", "a"), "messages[1].tool_calls[0].function.arguments"),
        (history("a", "[1]", "a"), "messages[1].tool_calls[0].function.arguments"),
        (history("a", 7, "a"), "messages[1].tool_calls[0].function.arguments"),
        (history("a", "{}", "b"), "messages[2].tool_call_id"),
        ([*HI, {"role": "assistant", "tool_calls": "none"}], "messages[1].tool_calls"),
        ([*HI, {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls[0].function"),
    ],
)
def test_13_a_malformed_history_is_a_400_that_names_the_place(
    messages: list[Any], param: str, gateway: GatewayProcess
) -> None:
    response = gateway.post(CHAT, {"messages": messages, "tools": TOOLS})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("messages", [history("a", "{}", "a"), history(None, {}, None)])
def test_13_a_well_formed_history_is_rendered(
    messages: list[Any], engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    answers(engine, "noon")
    assert both(gateway, {"messages": messages})["content"] == "noon"
    prompt = text_of(engine.generates[0].prompt.tolist())
    assert '<tool_call>{"name": "now", "arguments": {}}</tool_call>' in prompt


def _saying(ids: list[int], _generate: Generate) -> Says:
    return Says([ids])


def test_14_special_tokens_inside_a_call_are_no_part_of_it(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    ids = marked_ids(COLOGNE)
    name = bytes(i % 256 for i in ids).index(b"weather")
    for at in (1, name + 3, len(ids) - 2):
        made: list[int] = [*ids[:at], 256, *ids[at:]]
        engine.script = partial(_saying, made)
        assert both(gateway, WITH_TOOLS)["calls"] == [("weather", '{"city": "Köln"}')]
    answers(engine, call("wether", {}))
    answer = both(gateway, WITH_TOOLS)
    assert answer["calls"] == [("wether", "{}")]
    assert answer["warnings"] == ["unknown_tool"]


def test_15_one_call_at_most_ends_the_generation_with_it(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.step_s = 0.002
    answers(engine, COLOGNE + call("now", {}) * 50)
    body = {**WITH_TOOLS, "parallel_tool_calls": False}
    answer = both(gateway, body)
    assert answer["calls"] == [("weather", '{"city": "Köln"}')]
    assert answer["finish"] == "tool_calls"
    for generate in engine.generates:
        engine.await_abort(generate.request)
    usage = whole(gateway, body)["usage"]
    assert usage["completion_tokens"] <= len(marked_ids(COLOGNE))


OFF: dict[str, dict[str, Any]] = {
    "enable_thinking": {"chat_template_kwargs": {"enable_thinking": False}},
    "thinking": {"chat_template_kwargs": {"thinking": False}},
    "thinking_mode": {"chat_template_kwargs": {"thinking_mode": "disabled"}},
    "reasoning_effort": {"reasoning_effort": "none"},
    "reasoning.effort": {"reasoning": {"effort": "none"}},
    "reasoning.enabled": {"reasoning": {"enabled": False}},
    "thinking.type": {"thinking": {"type": "disabled"}},
    "top-level enable_thinking": {"enable_thinking": False},
}
ON: dict[str, dict[str, Any]] = {
    "enable_thinking": {"chat_template_kwargs": {"enable_thinking": True}},
    "thinking": {"chat_template_kwargs": {"thinking": True}},
    "thinking_mode": {"chat_template_kwargs": {"thinking_mode": "enabled"}},
    "reasoning_effort": {"reasoning_effort": "high"},
    "reasoning.effort": {"reasoning": {"effort": "low"}},
    "reasoning.enabled": {"reasoning": {"enabled": True}},
    "thinking.type": {"thinking": {"type": "enabled"}},
    "top-level enable_thinking": {"enable_thinking": True},
}


@pytest.mark.parametrize("spelling", OFF)
def test_16_thinking_off_is_all_content_and_thinking_on_starts_inside(
    spelling: str, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    answers(engine, "All of this is the answer.")
    off = whole(gateway, {"messages": HI, **OFF[spelling]})["choices"][0]["message"]
    assert (off["content"], off["reasoning"]) == ("All of this is the answer.", None)
    answers(engine, "I think.\n</think>\n\nYes.")
    body = {"messages": HI, "return_effective_kwargs": True, **ON[spelling]}
    on = whole(gateway, body)
    message = on["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("Yes.", "I think.")
    assert message["reasoning_content"] == "I think."
    assert on["effective"] == {"chat_template_kwargs": {"enable_thinking": True}}
    answers(engine, "I think on and on")
    assert both(gateway, {"messages": HI, **ON[spelling]})["reasoning"] == "I think on and on"


def test_17_a_megabyte_of_markup_is_read_in_no_time(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    text = ("<tool_cal" * 10 + "<think" * 10 + "{" * 50) * 700
    answers(engine, text, size=4096)
    assert whole(gateway, WITH_TOOLS)["choices"][0]["message"]["content"] == text


def test_18_text_of_many_bytes_a_character_is_never_broken(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    text = "né 日本語 👩‍👩‍👧‍👦 é"
    answers(engine, f"<think>{text}</think>{text}{call('weather', {'city': text})}")
    events = stream(gateway, WITH_TOOLS)
    assert "\ufffd" not in json.dumps(events, ensure_ascii=False)
    answer = spoken(events)[0]
    assert (answer["content"], answer["reasoning"]) == (text, text)
    assert json.loads(answer["calls"][0][2]) == {"city": text}


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_19_a_stop_string_ends_content_and_nothing_else(
    size: int, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    thought, city = "STOP? no, go on", "STOPPED"
    text = f"<think>{thought}</think>STO ST S{call('weather', {'city': city})}"
    answers(engine, text, size=size)
    body = {**WITH_TOOLS, "stop": ["STOP"]}
    answer = both(gateway, body)
    assert (answer["reasoning"], answer["content"]) == (thought, "STO ST S")
    assert answer["calls"] == [("weather", f'{{"city": "{city}"}}')]
    assert answer["finish"] == "tool_calls"
    answers(engine, f"<think>{thought}</think>before STOP after", size=size)
    answer = both(gateway, body)
    assert (answer["content"], answer["finish"]) == ("before ", "stop")


def test_20_a_failure_in_mid_stream_is_one_error_and_the_end(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    error = ErrorInfo(code="step_failed", message="a secret")
    answers(engine, f"<think>hm</think>{COLOGNE}"[:-20], finish="error", error=error)
    events = stream(gateway, WITH_TOOLS)
    assert events.pop()["error"]["code"] == "step_failed"
    assert spoken(events)[0]["finish"] is None
    response = gateway.post(CHAT, {"messages": HI, "n": 0, "stream": True})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"


def test_21_every_stream_ends_with_one_finish_a_choice_then_usage_then_done(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    """At random, many at once; `events_of` and `spoken` check the rest."""
    rng = random.Random(21)
    parts = ["text ", "<think>", "</think>", "<tool_call>", "</tool_call>", COLOGNE, "{", "\n"]
    lock = threading.Lock()

    def at_random(generate: Generate) -> Says:
        with lock:
            text = "".join(rng.choices(parts, k=rng.randrange(6)))
            reply = says(text, marked=True, size=rng.choice((1, 3, 50)))
            reply.finish = rng.choice(("stop", "length"))
        reply.stop_token = EOS if reply.finish == "stop" else None
        return reply

    engine.script = at_random
    options = {"stream_options": {"include_usage": True}}

    def run(place: int) -> None:
        n = 1 + place % 3
        events = stream(gateway, {**WITH_TOOLS, **options, "n": n})
        assert events.pop()["usage"]["completion_tokens"] >= 0
        choices = spoken(events)
        assert len(choices) == n
        assert all(choice["finish"] for choice in choices.values())

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(run, range(300)))


def test_22_many_different_calls_at_once_are_as_if_alone(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    def echo(generate: Generate) -> Says:
        prompt = text_of(generate.prompt.tolist())
        return says(f"<think>{len(prompt)}</think>{prompt[-30:]}", marked=True, size=5)

    engine.script = echo
    chats: list[Callable[[int], Any]] = [
        lambda i: without_ids(streamed(gateway, {"messages": [user(f"streamed {i}")]})),
        lambda i: without_ids(streamed(gateway, {**WITH_TOOLS, "messages": [user(f"tools {i}")]})),
        lambda i: whole(gateway, {"messages": [user(f"é {i}")], "max_tokens": 9})["choices"],
        lambda i: gateway.post("/tokenize", {"prompt": f"語 {i}"}).json(),
        lambda i: gateway.post("/tokenize", {"messages": [user(f"{i}")], "tools": TOOLS}).json(),
        lambda i: gateway.post("/detokenize", {"tokens": [65 + i % 26]}).json(),
    ]

    def run(place: int) -> Any:
        return chats[place % len(chats)](place)

    alone = [run(place) for place in range(200)]
    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(run, range(200))) == alone


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


# ---- structured output: the engine's own compiler decides what can be enforced


class Compiling:
    """A script that refuses what the engine's compiler refuses, and says `text` to all else."""

    def __init__(self, text: str = "{}") -> None:
        self.text = text
        self._compiler = Compiler(thinking_card())

    def __call__(self, generate: Generate) -> Reply:
        try:
            if generate.grammar is not None:
                check_grammar(generate.grammar)
                self._compiler.compile(generate.grammar)
        except InvalidRequest as error:
            return error.info()
        return says(self.text, marked=True)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def structured(**members: Any) -> dict[str, Any]:
    return {"messages": HI, "structured_outputs": members}


def json_schema(schema: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    return {"messages": HI, "response_format": wanted}


@pytest.mark.parametrize(
    "body",
    [
        structured(json=""),
        structured(json_object=False),
        structured(structural_tag=""),
        structured(regex="(?<=x)*"),
        structured(regex="(" * 60_000),
        structured(grammar="start: " + "(" * 60_000),
        structured(choice=["x" * 100] * 10_000),
        structured(json={"enum": ["x" * 1000 + str(i) for i in range(1000)]}),
        structured(json={"$ref": "#"}) | OFF["thinking"],
        structured(json={"type": "string", "pattern": "(?=a)b"}),
        structured(),
        structured(regex="a", choice=["b"]),
        structured(guided="a"),
    ],
    ids=lambda body: str(body["structured_outputs"])[:30],
)
def test_56_a_form_that_cannot_be_enforced_is_a_400_and_harms_nobody(
    body: dict[str, Any], engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = Compiling("fine")
    for more in ({}, {"stream": True}):
        response = gateway.post(CHAT, {**body, **more})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"].startswith("structured_outputs")
    assert both(gateway, {"messages": HI})["content"] == "fine"


def test_57_a_bad_grammar_after_a_good_one_is_a_400_for_it_alone(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = Compiling('{"a": 1}')
    assert both(gateway, json_schema(SCHEMA))["content"] == '{"a": 1}'
    response = gateway.post(CHAT, structured(grammar='start: nothing "'))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "structured_outputs"
    assert both(gateway, json_schema(SCHEMA))["content"] == '{"a": 1}'
    assert [generate.grammar is not None for generate in engine.generates] == [True] * 5


def test_58_a_keyword_that_is_not_understood_is_named_in_a_400(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = Compiling()
    response = gateway.post(CHAT, json_schema({**SCHEMA, "unevaluatedProperties": False}))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "response_format")
    assert "unevaluatedProperties" in error["message"]


@pytest.mark.parametrize(
    ("said", "thinking"),
    [
        (ON["enable_thinking"], Thinking(opens="<think>", closes="</think>", inside=True)),
        (OFF["enable_thinking"], None),
        ({}, Thinking(opens="<think>", closes="</think>", optional=True)),
    ],
    ids=["on", "off", "omitted"],
)
def test_60_a_form_begins_where_the_thinking_ends(
    said: dict[str, Any],
    thinking: Thinking | None,
    engine: ScriptedEngine,
    gateway: GatewayProcess,
) -> None:
    thought = {None: "", "on": "hm</think>", "omitted": "<think>hm</think>"}
    key = None if thinking is None else "on" if thinking.inside else "omitted"
    engine.script = Compiling(thought[key] + '{"a": 1}')
    answer = both(gateway, {**json_schema(SCHEMA), **said})
    assert answer["content"] == '{"a": 1}'
    assert answer["reasoning"] == ("hm" if thought[key] else "")
    grammar = engine.generates[0].grammar
    assert grammar is not None
    assert grammar.thinking == thinking
    assert isinstance(grammar.body, JsonSchema)


def test_a_required_call_is_demanded_in_the_models_own_format(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = Compiling(COLOGNE)
    answer = both(gateway, {**WITH_TOOLS, "tool_choice": "required"})
    assert (answer["finish"], answer["warnings"]) == ("tool_calls", [])
    grammar = engine.generates[0].grammar
    assert grammar is not None
    assert isinstance(grammar.body, Lark)
    assert '"weather' in grammar.body.text.replace('\\"', '"')


# ---- what a request may ask, beside


def test_65_an_unknown_field_is_listed_or_refused(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    answers(engine, "ok")
    body = {"messages": HI, "max_tokenz": 5}
    assert whole(gateway, body)["ignored_params"] == ["max_tokenz"]
    events = stream(gateway, body)
    assert [event.get("ignored_params") for event in events[:2]] == [["max_tokenz"], None]
    response = gateway.post(CHAT, {**body, "strict_params": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokenz")
    response = gateway.post(CHAT, {"messages": HI, "reasoning_effort": "banana"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "reasoning_effort")
    assert "none, minimal, low, medium, high, xhigh, max" in error["message"]


def test_reasoning_is_counted_and_may_be_left_out(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    answers(engine, f"<think>12345</think>yes{COLOGNE}", size=4)
    answer = whole(gateway, WITH_TOOLS)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    silent = both(gateway, {**WITH_TOOLS, "include_reasoning": False})
    assert (silent["reasoning"], silent["content"]) == ("", "yes")


def test_logprobs_and_ids_cover_every_token_of_reasoning_calls_and_text(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    text = f"<think>hm</think>yes{COLOGNE}"
    ids = [*marked_ids(text), EOS]
    for size in (1, 3, 1000):
        answers(engine, text, size=size)
        body = {**WITH_TOOLS, "logprobs": True, "return_token_ids": True}
        (choice,) = whole(gateway, body)["choices"]
        assert choice["token_ids"] == ids
        assert len(choice["logprobs"]["content"]) == len(ids)
        events = [event["choices"][0] for event in stream(gateway, body)]
        assert [i for event in events for i in event.get("token_ids", [])] == ids
        told = [event["logprobs"]["content"] for event in events if event["logprobs"]]
        assert [item for items in told for item in items] == choice["logprobs"]["content"]


def test_words_and_tokens_reach_the_engine(engine: ScriptedEngine, gateway: GatewayProcess) -> None:
    answers(engine, "ok")
    body = {
        "messages": HI,
        "bad_words": ["no"],
        "allowed_token_ids": [65, EOS],
        "logprobs": True,
        "logprob_token_ids": [66],
        "prompt_logprobs": 1,
    }
    answer = whole(gateway, body)
    params = engine.generates[0].params
    assert params.bad_words == [list(b"no"), list(b" no")]
    assert (params.allowed_token_ids, params.logprob_token_ids) == ([65, EOS], [66])
    prompt = engine.generates[0].prompt.tolist()
    assert len(answer["prompt_logprobs"]) == len(prompt)
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1][str(prompt[1])]["rank"] == 1


def test_a_batch_is_many_conversations_each_read_in_its_own_way(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    def echo(generate: Generate) -> Says:
        prompt = text_of(generate.prompt.tolist())
        name = prompt.rpartition("<user>")[2][0]
        return says(f"{name}</think>{name}{call('now', {})}", marked=True)

    engine.script = echo
    begun = {"role": "assistant", "content": "<think>so "}
    conversations = [[user("a")], [user("b"), begun], [user("c")]]
    body = {"messages": conversations, "tools": TOOLS, "n": 2, "continue_final_message": True}
    response = gateway.post(CHAT + "/batch", body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3, 4, 5]
    assert [choice["conversation"] for choice in choices] == [0, 0, 1, 1, 2, 2]
    messages = [choice["message"] for choice in choices]
    assert [message["reasoning"] for message in messages] == [None, None, "b", "b", None, None]
    assert messages[2]["content"] == "b"
    assert {message["tool_calls"][0]["function"]["name"] for message in messages} == {"now"}
    ids = [message["tool_calls"][0]["id"] for message in messages]
    assert len(set(ids)) == 6


def test_a_batch_tells_effective_kwargs_and_errors_by_conversation(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    answers(engine, "ok")
    body = {"messages": [HI, HI], "return_effective_kwargs": True, "reasoning_effort": "none"}
    answer = gateway.post(CHAT + "/batch", body).json()
    assert answer["effective"] == [{"chat_template_kwargs": {"enable_thinking": False}}] * 2
    for fields, param in (
        ({"messages": [HI, [{"role": "king", "content": ""}]]}, "messages[1][0].role"),
        ({"messages": [HI], "stream": True}, "stream"),
        ({"messages": [HI] * 1025}, "messages"),
    ):
        response = gateway.post(CHAT + "/batch", fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_tokenize_sends_what_chat_would_send(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    answers(engine, "ok")
    for said in ({}, ON["reasoning_effort"], OFF["thinking"], {"tool_choice": "none"}):
        body = {**WITH_TOOLS, **said}
        tokens = gateway.post("/tokenize", body).json()["tokens"]
        whole(gateway, body)
        assert engine.generates[-1].prompt.tolist() == tokens


def test_a_requests_own_template_is_refused_unless_the_operator_trusts_it(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    answers(engine, "ok")
    body = {"messages": HI, "chat_template": "{{ messages[0].content }}!"}
    response = gateway.post(CHAT, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")
    with GatewayProcess(engine=engine.address, trust_request_chat_template=True) as trusting:
        trusting.await_ready()
        assert said_whole(whole(trusting, body))[0]["content"] == "ok"
        assert text_of(engine.generates[-1].prompt.tolist()) == "hi!"
        response = trusting.post(CHAT, {"messages": HI, "chat_template": "{% if %}"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")


# ---- what the operator may choose


def test_the_formats_and_why_they_were_chosen_are_told(gateway: GatewayProcess) -> None:
    (model,) = requests.get(gateway.url + "/v1/models", timeout=5).json()["data"]
    formats = model["formats"]
    assert (formats["tools"], formats["reasoning"]) == ("hermes", "qwen3")
    assert "the chat template writes <tool_call>" in formats["why"]


def test_the_operator_chooses_template_formats_and_defaults(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{{ enable_thinking }} <think>{{ messages[0].content }}")
    options: dict[str, Any] = {
        "chat_template": str(template),
        "tool_format": "none",
        "reasoning_format": "none",
        "default_chat_template_kwargs": '{"thinking": false}',
    }
    answers(engine, "<think>text</think>" + COLOGNE)
    with GatewayProcess(engine=engine.address, **options) as own:
        own.await_ready()
        (model,) = requests.get(own.url + "/v1/models", timeout=5).json()["data"]
        assert model["formats"] == {"tools": None, "reasoning": None, "why": "as the options say"}
        content = whole(own, WITH_TOOLS)["choices"][0]["message"]["content"]
        assert content == "<think>text</think>" + COLOGNE
        assert text_of(engine.generates[-1].prompt.tolist()) == "False <think>hi"
    assert "formats: as the options say" in own.log


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("tool_format", "hermez", "there is no tool format 'hermez'; there are "),
        ("reasoning_format", "qwen", "there is no reasoning format 'qwen'; there are "),
        ("chat_template", "/nowhere/at.all", "--chat-template /nowhere/at.all: "),
        ("default_chat_template_kwargs", "[]", "--default-chat-template-kwargs: "),
        ("default_chat_template_kwargs", '{"tools": 1}', "--default-chat-template-kwargs: "),
    ],
)
def test_a_wrong_option_is_one_line_at_the_start(
    option: str, value: str, said: str, engine: ScriptedEngine
) -> None:
    options: dict[str, Any] = {option: value}
    with GatewayProcess(engine=engine.address, **options) as wrong:
        assert wrong.wait() != 0
    assert f"the gateway cannot start: {said}" in wrong.log
    assert "Traceback" not in wrong.log
