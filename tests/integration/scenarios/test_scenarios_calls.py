"""Scenarios of tool calls."""

from __future__ import annotations

import itertools
import json
from functools import partial
from typing import Any

import pytest

from protocol.engine.grammar import LiteralForm, Rules, forms_of
from protocol.engine.messages import Generate
from tests.support.gateway_process import GatewayProcess
from tests.support.http import error_of, fold_chat_stream
from tests.support.scenarios import (
    CHAT,
    COLOGNE,
    HI,
    TOOLS,
    WITH_TOOLS,
    Compiling,
    answers,
    both,
    call,
    stream,
    streamed,
    whole,
    without_ids,
)
from tests.support.scripted_engine import (
    ScriptedEngine,
    TokenReply,
    marked_ids,
    text_of,
    text_reply,
)


def test_2_three_calls_in_one_delta_are_three_calls(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    cities = ["Köln", "Oslo", "Rom"]
    answers(engine, "\n".join(call("weather", {"city": c}) for c in cities), size=10_000)
    calls = fold_chat_stream(stream(gateway, WITH_TOOLS))[0]["calls"]
    assert [json.loads(arguments) for _, _, arguments in calls] == [{"city": c} for c in cities]
    assert len({call_id for call_id, _, _ in calls}) == 3


def test_3_a_delta_with_the_end_of_thinking_and_the_start_of_a_call_shows_no_tag(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    ids = marked_ids(f"<think>the end.</think>{COLOGNE}")
    at = ids.index(marked_ids("</think>")[0])
    engine.script = lambda generate: TokenReply(
        [ids[: at - 4], ids[at - 4 : at + 2], ids[at + 2 :]]
    )
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

    def by_seed(generate: Generate) -> TokenReply:
        return text_reply(texts[generate.params.seed or 0], marked=True)

    engine.script = by_seed
    engine.step_s = 0.004
    events = stream(gateway, {**WITH_TOOLS, "n": 3, "seed": 5})
    engine.step_s = 0.0005
    together = without_ids(fold_chat_stream(events))
    order = [event["choices"][0]["index"] for event in events]
    assert sum(a != b for a, b in itertools.pairwise(order)) > 50, "they interleave"
    for place, seed in enumerate(texts):
        assert together[place] == without_ids(streamed(gateway, {**WITH_TOOLS, "seed": seed}))[0]


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
def test_8_any_text_in_an_argument_arrives(
    value: str, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    """Markers in the argument are spelt with ordinary tokens, because a marker's own token would be
    parsed as markup."""
    head, tail = call("weather", {"city": "@"}).split("@")
    inner = json.dumps(value)[1:-1].encode()
    ids = [*marked_ids(head), *inner, *marked_ids(tail)]
    engine.script = lambda generate: TokenReply(
        [ids[at : at + 50] for at in range(0, len(ids), 50)]
    )
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
    ((_, result),) = both(gateway, WITH_TOOLS)["calls"]
    assert json.loads(result) == arguments


def test_11_prose_that_mentions_the_tag_flows(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    text = "One writes <tool_call> and then JSON, or <tool_call as text."
    engine.script = lambda generate: text_reply(text)  # spelt by ordinary tokens
    events = stream(gateway, WITH_TOOLS)
    bits = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(bits) == text
    assert max(map(len, bits)) <= 2, "a blank may wait for the next letter, nothing else does"


def test_12_arguments_that_are_not_json_are_passed_on_with_a_warning(
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
    assert error_of(response, 400)["param"] == param


@pytest.mark.parametrize("messages", [history("a", "{}", "a"), history(None, {}, None)])
def test_13_a_well_formed_history_is_rendered(
    messages: list[Any], engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    answers(engine, "noon")
    assert both(gateway, {"messages": messages})["content"] == "noon"
    prompt = text_of(engine.generates[0].prompt.tolist())
    assert '<tool_call>{"name": "now", "arguments": {}}</tool_call>' in prompt


@pytest.mark.parametrize("arguments", ["{", "[1]"])
def test_13_arguments_that_a_model_wrote_wrongly_are_rendered(
    arguments: str, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    answers(engine, "noon")
    messages = history("a", arguments, "a")
    assert both(gateway, {"messages": messages})["content"] == "noon"
    prompt = text_of(engine.generates[0].prompt.tolist())
    written = json.dumps({"INVALID_JSON": arguments})
    assert f'<tool_call>{{"name": "now", "arguments": {written}}}</tool_call>' in prompt


def _saying(ids: list[int], _generate: Generate) -> TokenReply:
    return TokenReply([ids])


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


def test_a_required_call_is_demanded_in_the_models_own_format(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = Compiling(COLOGNE)
    answer = both(gateway, {**WITH_TOOLS, "tool_choice": "required"})
    assert (answer["finish"], answer["warnings"]) == ("tool_calls", [])
    grammar = engine.generates[0].grammar
    assert grammar is not None
    assert isinstance(grammar.body, Rules)
    written = "".join(form.text for form in forms_of(grammar.body) if isinstance(form, LiteralForm))
    assert '{"name": "weather", "arguments": ' in written
