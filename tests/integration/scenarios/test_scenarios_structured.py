"""Answers of a given form: the engine's own compiler decides what can be enforced."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess
from tests.support.scenarios import (
    CHAT,
    HI,
    OFF,
    SCHEMA,
    Compiling,
    Tasteful,
    both,
    json_schema,
    structured,
)
from tests.support.scripted_engine import (
    ScriptedEngine,
)


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


def test_58_a_keyword_in_a_tools_schema_is_named_with_the_tools_place(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = Compiling()
    parameters = {"type": "object", "properties": {}, "unevaluatedProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    response = gateway.post(CHAT, {"messages": HI, "tools": [tool], "tool_choice": "required"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools[0].function.parameters")
    assert "unevaluatedProperties" in error["message"]


DEEP: dict[str, Any] = {"type": "integer"}
for _ in range(20):
    DEEP = {"type": "array", "items": DEEP, "minItems": 1, "maxItems": 1}


@pytest.mark.parametrize("blanks", [b" ", b"\n", b"\t\n ", b"\r\n"], ids=repr)
@pytest.mark.parametrize(
    "schema",
    [
        {
            "type": "object",
            "properties": {"a": {"enum": [1, "two", None]}, "b": {"type": "number"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 5},
        DEEP,
    ],
    ids=["object", "array", "deep"],
)
def test_59_a_model_that_likes_blanks_best_completes_its_json_all_the_same(
    schema: dict[str, Any], blanks: bytes, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = Tasteful(lambda said: blanks)
    answer = both(gateway, json_schema(schema) | OFF["thinking"])
    assert answer["finish"] == "stop"
    json.loads(answer["content"])
    runs = re.findall(r"[ \t\r\n]+", answer["content"])
    assert runs, "it had its way"
    assert max(map(len, runs)) <= 8
