"""Scenarios of tools together with a form, such as a JSON schema or a regular expression: an answer
is either tool calls or a text of that form.

The scripted model prefers some tokens, but only those that the grammar's masks allow are sampled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess
from tests.support.http import error_of, json_of
from tests.support.scenarios import (
    CHAT,
    COLOGNE,
    HI,
    OFF,
    ON,
    SCHEMA,
    TOOLS,
    Compiling,
    Tasteful,
    both,
    call,
    held_to,
    json_schema,
    whole,
)
from tests.support.scripted_engine import EOS, ScriptedEngine

ANSWER = '{"a": 1}'
THOUGHT = "<think>\nhm\n</think>\n\n"
BOTH = json_schema(SCHEMA) | {"tools": TOOLS}
STRICT = {**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}


def calls(answer: dict[str, Any]) -> list[Any]:
    return [(name, json.loads(arguments)) for name, arguments in answer["calls"]]


@pytest.mark.parametrize("thinking", [{}, ON["thinking"], OFF["thinking"]], ids=str)
def test_a_model_may_call_a_tool_or_answer_in_the_form(
    thinking: dict[str, Any], engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    prompt_thinks, thinks = thinking is ON["thinking"], thinking is not OFF["thinking"]
    before = "" if not thinks else THOUGHT.removeprefix("<think>\n") if prompt_thinks else THOUGHT
    for text in (COLOGNE, ANSWER):
        engine.script = held_to(before + text)
        answer = both(gateway, BOTH | thinking)
        assert answer["reasoning"] == ("hm" if thinks else "")
        if text == COLOGNE:
            assert (answer["content"], calls(answer)) == ("", [("weather", {"city": "Köln"})])
            assert answer["finish"] == "tool_calls"
        else:
            assert (answer["content"], answer["calls"]) == (ANSWER, [])
            assert answer["finish"] == "stop"


def test_neither_prose_nor_another_object_is_possible(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    for text in ("Well, ", '{"b": 1}', '<tool_call>\n{"name": "else', ANSWER + COLOGNE):
        engine.script = held_to(text)
        answer = both(gateway, BOTH | OFF["thinking"])
        if answer["content"]:
            assert isinstance(json.loads(answer["content"])["a"], int)
        assert bool(answer["content"]) != bool(answer["calls"])


def test_several_calls_may_follow_each_other_but_not_the_form(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = held_to(f"{COLOGNE}\n{COLOGNE}", COLOGNE + ANSWER)
    assert len(both(gateway, BOTH | OFF["thinking"])["calls"]) == 2
    alone = BOTH | {"parallel_tool_calls": False} | OFF["thinking"]
    assert len(both(gateway, alone)["calls"]) == 1


def test_markup_in_a_text_of_the_form_is_no_call(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    schema = {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]}
    text = '{"s": "<tool_call>{}</tool_call>"}'

    def spelt(said: list[int]) -> Iterable[int]:
        ids = list(text.encode())
        yield ids[len(said)] if len(said) < len(ids) else EOS

    engine.script = Tasteful(spelt)
    answer = both(gateway, json_schema(schema) | {"tools": TOOLS} | OFF["thinking"])
    assert (answer["content"], answer["calls"]) == (text, [])


def test_arguments_of_strict_tools_fit_and_others_are_free(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    wrong = COLOGNE.replace('"Köln"', "17")
    engine.script = held_to(wrong)
    assert calls(both(gateway, BOTH | OFF["thinking"])) == [("weather", {"city": 17})]
    strict = BOTH | {"tools": [STRICT]} | OFF["thinking"]
    assert calls(both(gateway, strict)) == [("weather", {"city": ""})]


WISHES: list[tuple[Any, Callable[[dict[str, Any]], bool]]] = [
    ("required", lambda answer: bool(answer["calls"]) and not answer["content"]),
    (
        {"type": "function", "function": {"name": "now"}},
        lambda answer: {name for name, _ in answer["calls"]} == {"now"},
    ),
    ("none", lambda answer: not answer["calls"] and bool(json.loads(answer["content"]))),
]


@pytest.mark.parametrize(("choice", "is_right"), WISHES, ids=["required", "named", "none"])
def test_tool_choice_decides_between_a_call_and_the_form(
    choice: Any,
    is_right: Callable[[dict[str, Any]], bool],
    engine: ScriptedEngine,
    gateway: GatewayProcess,
) -> None:
    for text in (ANSWER, COLOGNE, THOUGHT + ANSWER, THOUGHT + COLOGNE):
        engine.script = held_to(text)
        answer = both(gateway, BOTH | {"tool_choice": choice})
        assert is_right(answer), answer
        assert (answer["reasoning"] == "hm") == text.startswith(THOUGHT)


def test_other_forms_may_stand_beside_calls_too(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    for form in (
        {"choice": ["yes", "no"]},
        {"regex": "yes|no"},
        {"grammar": 'start: "yes" | "no"'},
        {"grammar": 'root ::= "yes" | "no"'},
    ):
        asked = {"messages": HI, "tools": TOOLS, "structured_outputs": form} | OFF["thinking"]
        for text in ("no", COLOGNE):
            engine.script = held_to(text)
            answer = both(gateway, asked)
            assert answer["content"] == ("no" if text == "no" else "")
            assert bool(answer["calls"]) == (text == COLOGNE)


def test_an_error_names_its_field(engine: ScriptedEngine, gateway: GatewayProcess) -> None:
    engine.script = Compiling()
    lookaround = {"type": "string", "pattern": "(?=a)b"}
    odd = {"type": "object", "properties": {"x": lookaround}}
    function = {"name": "f", "strict": True, "parameters": odd}
    refused = gateway.post(CHAT, BOTH | {"tools": [{"type": "function", "function": function}]})
    assert error_of(refused, 400)["param"] == "tools[0].function.parameters"


# ---- the other APIs


def test_responses(engine: ScriptedEngine, gateway: GatewayProcess) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    form = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": False}}
    asked = {"input": "hi", "tools": tools, "text": form, "store": False}
    for text, kind in ((COLOGNE, "function_call"), (ANSWER, "message")):
        engine.script = held_to(THOUGHT + text)
        response = gateway.post("/v1/responses", asked)
        assert [item["type"] for item in json_of(response)["output"]] == ["reasoning", kind]


def test_messages(engine: ScriptedEngine, gateway: GatewayProcess) -> None:
    tools = [
        {"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in TOOLS
    ]
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    asked = {"max_tokens": 99, "messages": HI, "tools": tools, "output_config": form}
    for text, kind in ((COLOGNE, "tool_use"), (ANSWER, "text")):
        engine.script = held_to(THOUGHT + text)
        response = gateway.post("/v1/messages", asked)
        assert [block["type"] for block in json_of(response)["content"]] == ["thinking", kind]


def test_the_logprobs_and_ids_of_the_form_are_complete(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = held_to(ANSWER)
    answer = whole(gateway, BOTH | OFF["thinking"] | {"return_token_ids": True})
    assert answer["choices"][0]["token_ids"][: len(ANSWER)] == list(ANSWER.encode())


# ---- some of the tools


def allowed(mode: str, name: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}}]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_only_allowed_tools_are_called_and_all_are_shown(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    now = call("now", {})
    asked = {"messages": HI, "tools": TOOLS} | OFF["thinking"]
    shown = []
    for choice in ("auto", allowed("auto", "now"), allowed("required", "now")):
        engine.script = held_to(COLOGNE, now)
        answer = both(gateway, asked | {"tool_choice": choice})
        assert calls(answer) == ([("weather", {"city": "Köln"})] if choice == "auto" else NOW)
        shown.append(engine.generates[-1].prompt.tolist())
    assert shown[0] == shown[1] == shown[2]
    engine.script = held_to("Just text.")
    assert both(gateway, asked | {"tool_choice": allowed("auto", "now")})["content"] == "Just text."
    assert both(gateway, asked | {"tool_choice": allowed("required", "now")})["calls"]
    with_form = BOTH | OFF["thinking"] | {"tool_choice": allowed("auto", "now")}
    for text, made in ((COLOGNE, NOW), (now, NOW), (ANSWER, [])):
        engine.script = held_to(text, now)
        assert calls(both(gateway, with_form)) == made


NOW: list[Any] = [("now", {})]


def test_only_allowed_tools_are_called_in_responses(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked: dict[str, Any] = {"input": "hi", "tools": tools, "store": False}
    chosen = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "now"}],
    }
    engine.script = held_to(COLOGNE, call("now", {}))
    response = gateway.post("/v1/responses", asked | {"tool_choice": chosen}).json()
    assert [item["name"] for item in response["output"]] == ["now"]
    assert response["tool_choice"] == chosen
    for wrong, at in (
        ({"tools": [{"type": "function", "name": "other"}]}, "tool_choice.tools[0].name"),
        ({"mode": "any"}, "tool_choice.mode"),
        ({"tools": []}, "tool_choice.tools"),
    ):
        refused = gateway.post("/v1/responses", asked | {"tool_choice": chosen | wrong})
        assert error_of(refused, 400)["param"] == at
        assert at in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "replacement"),
    [
        ({"functions": [{"name": "f"}]}, "`tools`"),
        ({"function_call": {"name": "f"}}, "`tool_choice`"),
    ],
)
def test_old_forms_of_tools_are_refused_with_their_replacement(
    fields: dict[str, Any], replacement: str, gateway: GatewayProcess
) -> None:
    refused = gateway.post(CHAT, {"messages": HI, **fields})
    assert replacement in error_of(refused, 400)["message"]
