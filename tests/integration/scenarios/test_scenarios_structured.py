"""Scenarios of constrained answers. The engine's own compiler decides what can be enforced."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess
from tests.support.http import error_of, json_of
from tests.support.scenarios import (
    CHAT,
    HI,
    OFF,
    Compiling,
    Tasteful,
    both,
    json_schema,
    structured,
)
from tests.support.scripted_engine import ScriptedEngine

AGED = {"type": "object", "properties": {"age": {"type": "integer", "minimun": 0}}}


@pytest.mark.parametrize(
    "body",
    [
        structured(regex="(?<=x)*"),
        structured(regex="(" * 60_000),
        structured(grammar="start: " + "(" * 60_000),
        structured(choice=["x" * 100] * 10_000),
        structured(json={"enum": ["x" * 1000 + str(i) for i in range(1000)]}),
        structured(json={"$ref": "#"}) | OFF["thinking"],
        structured(json={"type": "string", "pattern": "(?=a)b"}),
    ],
    ids=lambda body: str(body["structured_outputs"])[:30],
)
def test_56_a_form_that_cannot_be_enforced_is_a_400(
    body: dict[str, Any], engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = Compiling("fine")
    for more in ({}, {"stream": True}):
        response = gateway.post(CHAT, {**body, **more})
        assert error_of(response, 400)["param"].startswith("structured_outputs")
    assert both(gateway, {"messages": HI})["content"] == "fine"


def test_58_a_keyword_in_a_tools_schema_is_named_with_the_tools_place(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = Compiling()
    parameters = {"type": "object", "properties": {}, "unevaluatedProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    response = gateway.post(CHAT, {"messages": HI, "tools": [tool], "tool_choice": "required"})
    error = response.json()["error"]
    at = "tools[0].function.parameters.unevaluatedProperties"
    assert (response.status_code, error["param"]) == (400, at)
    assert "unevaluatedProperties" in error["message"]


PEERS_FIELDS: list[tuple[str, Any]] = [
    ("structured_outputs", {"choice": ["yes", "no"]}),
    ("guided_json", {"enum": ["yes", "no"]}),
    ("guided_regex", "yes|no"),
    ("guided_choice", ["yes", "no"]),
    ("guided_grammar", 'start: "yes" | "no"'),
    ("regex", "yes|no"),
    ("ebnf", 'root ::= "yes" | "no"'),
    ("json_schema", {"const": "yes"}),
    ("grammar", 'root ::= "yes" | "no"'),
]
ROUTES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HI, "max_tokens": 9} | OFF["thinking"]),
    (f"{CHAT}/batch", {"messages": [HI], "max_tokens": 9} | OFF["thinking"]),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 9}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 9, "enable_thinking": False}),
    ("/v1/messages", {"messages": HI, "max_tokens": 9} | OFF["thinking"]),
]


@pytest.mark.parametrize(("field", "value"), PEERS_FIELDS, ids=[f for f, _ in PEERS_FIELDS])
@pytest.mark.parametrize(("path", "body"), ROUTES, ids=[path for path, _ in ROUTES])
def test_a_form_is_enforced_under_the_field_names_of_other_servers(
    path: str,
    body: dict[str, Any],
    field: str,
    value: Any,
    engine: ScriptedEngine,
    gateway: GatewayProcess,
) -> None:
    engine.script = Tasteful(lambda said: b'xyes"')
    response = gateway.post(path, {**body, field: value})
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers
    assert re.search(r"\byes\b", response.text)
    assert "xyes" not in response.text
    for wrong in (17, {"a": {"b": 1}} if field not in ("guided_json", "json_schema") else [1]):
        refused = gateway.post(path, {**body, field: wrong})
        assert refused.status_code == 400, refused.text
        assert field in refused.text


@pytest.mark.parametrize(
    ("path", "body", "at"),
    [
        (CHAT, json_schema(AGED), "response_format.json_schema.schema.properties.age.minimun"),
        (
            "/v1/responses",
            {"input": "hi", "text": {"format": {"type": "json_schema", "schema": AGED}}},
            "text.format.schema.properties.age.minimun",
        ),
        (
            "/v1/messages",
            {
                "messages": HI,
                "max_tokens": 9,
                "output_config": {"format": {"type": "json_schema", "schema": AGED}},
            },
            "output_config.format.schema.properties.age.minimun",
        ),
        (
            "/v1/completions",
            {"prompt": "hi", "guided_json": AGED},
            "guided_json.properties.age.minimun",
        ),
    ],
)
def test_an_unknown_keyword_is_listed_and_refused_if_strict(
    path: str, body: dict[str, Any], at: str, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = Compiling()
    result = gateway.post(path, body)
    assert json_of(result)["ignored_params"] == [at]
    assert result.headers["x-ignored-fields"] == at
    refused = gateway.post(path, body | {"strict_params": True})
    assert refused.status_code == 400
    assert at in refused.text
    strict = json.loads(json.dumps(body).replace('"schema":', '"strict": true, "schema":'))
    if strict != body:
        refused = gateway.post(path, strict)
        assert refused.status_code == 400
        assert at in refused.text


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
