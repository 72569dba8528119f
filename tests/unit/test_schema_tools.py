"""The tools and tool_choice of a request become a ToolPlan, or a refusal."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.api.openai import requests
from gateway.api.openai.tools import ToolPlan, tool_plan
from gateway.http.body import decode
from protocol.wire.errors import InvalidRequest
from tests.support.custom_tools import custom_tool

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def plan(**fields: Any) -> ToolPlan:
    data = msgspec.json.encode({"messages": [{"role": "user", "content": "hi"}], **fields})
    return tool_plan(decode(data, requests.ChatBody))


def custom(kind: str) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "f", "format": {"type": kind}}}


ALLOWED = "tool_choice.allowed_tools"
DEFINITION = "tools[0].custom.format.grammar.definition"


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_tools_that_are_not_allowed_are_shown_and_not_called() -> None:
    both: dict[str, Any] = {"tools": [tool("f"), tool("g")]}
    for mode in ("auto", "required"):
        made = plan(**both, tool_choice=allowed(mode, "g"))
        assert (made.mode, made.name) == (mode, None)
        assert [tool["function"]["name"] for tool in made.shown] == ["f", "g"]
        assert [tool.name for tool in made.declared] == ["f", "g"]
        assert [tool.name for tool in made.callable] == ["g"]
        assert made.is_enforced
    assert not plan(**both, tool_choice=allowed("auto", "g", "f")).is_enforced


def test_tools_are_shown_and_their_calls_parsed_by_default() -> None:
    made = plan(tools=[tool("f", parameters=PARAMETERS), tool("g", strict=True)])
    assert [tool["function"]["name"] for tool in made.shown] == ["f", "g"]
    assert [(tool.name, tool.parameters) for tool in made.declared] == [
        ("f", PARAMETERS),
        ("g", None),
    ]
    assert (made.mode, made.name, made.allows_many, made.strict) == (
        "auto",
        None,
        True,
        frozenset({"g"}),
    )


def test_nothing_is_shown_without_tools_or_with_tool_choice_none() -> None:
    unspoken: tuple[dict[str, Any], ...] = (
        {},
        {"tools": []},
        {"tools": [], "tool_choice": "auto"},
        {"tools": None, "tool_choice": "none"},
        {"tools": [tool()], "tool_choice": "none"},
    )
    for fields in unspoken:
        assert plan(**fields) == ToolPlan()


def test_a_call_may_be_required_or_named_and_limited_to_one() -> None:
    both: dict[str, Any] = {"tools": [tool("f"), tool("g")]}
    assert plan(**both, tool_choice="required").mode == "required"
    one = plan(**both, tool_choice=named("g"), parallel_tool_calls=False)
    assert (one.mode, one.name, one.allows_many) == ("named", "g", False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [tool(), {"type": "retrieval"}]}, "tools[1].type"),
        ({"tools": [tool(), {"type": 5}]}, "tools[1].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 129)]}, "tools[0].function.name"),
        ({"tools": [tool("<tool_call>")]}, "tools[0].function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
        ({"tools": [tool(parameters="{}")]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [tool(description=1)]}, "tools[0].function.description"),
        ({"tools": [tool()], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tool_choice": allowed("auto", "f")}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, ALLOWED),
        ({"tools": [tool()], "tool_choice": allowed("none", "f")}, f"{ALLOWED}.mode"),
        ({"tools": [tool()], "tool_choice": allowed("auto")}, f"{ALLOWED}.tools"),
        (
            {"tools": [tool()], "tool_choice": allowed("auto", "f", "g")},
            f"{ALLOWED}.tools[1].function.name",
        ),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
        ({"tools": [tool(), custom_tool("f")]}, "tools[1].custom.name"),
        ({"tools": [custom("json")]}, "tools[0].custom.format.type"),
        ({"tools": [custom("grammar")]}, "tools[0].custom.format.grammar"),
        ({"tools": [custom_tool("f", "gbnf", "a")]}, "tools[0].custom.format.grammar.syntax"),
        ({"tools": [custom_tool("f", "regex", "")]}, DEFINITION),
        ({"tools": [custom_tool("f", "regex", "(?=a)")]}, DEFINITION),
        ({"tools": [custom_tool("f", "lark", "start: a")]}, DEFINITION),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": named("g")}, "tool_choice.function.name"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": named("g"), "tools": []}, "tool_choice"),
    ],
)
def test_an_invalid_tool_is_refused_with_its_path(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan(**fields)
    assert caught.value.param == param


def test_a_thousand_tools_are_checked_quickly() -> None:
    assert len(plan(tools=[tool(f"f{place}") for place in range(1024)]).declared) == 1024


def test_a_custom_tool_is_a_function_with_one_text() -> None:
    made = plan(tools=[custom_tool("note"), custom_tool("letters", "regex", "^a+$")])
    schemas = [shown["function"]["parameters"] for shown in made.shown]
    assert [list(schema["properties"]) for schema in schemas] == [["input"], ["input"]]
    assert all(tool.takes_text for tool in made.declared)
    assert made.strict == {"letters"}
    limits = [(tool.parameters or {})["properties"]["input"] for tool in made.declared]
    assert limits == [{"type": "string"}, {"type": "string", "pattern": "^(?:a+)$"}]
    descriptions = [shown["function"]["description"] for shown in made.shown]
    assert descriptions[0] == "Takes a note."
    assert "^a+$" in descriptions[1], "the model reads the grammar"


def test_a_custom_tool_can_be_named() -> None:
    choice = {"type": "custom", "custom": {"name": "note"}}
    made = plan(tools=[custom_tool("note"), tool("f")], tool_choice=choice)
    assert (made.mode, made.name) == ("named", "note")
    allows = {"mode": "auto", "tools": [choice]}
    made = plan(
        tools=[custom_tool("note"), tool("f")],
        tool_choice={"type": "allowed_tools", "allowed_tools": allows},
    )
    assert made.allowed == frozenset({"note"})


@pytest.mark.parametrize(
    "kind", ["web_search", "web_search_preview", "file_search", "mcp", "computer_use_preview"]
)
def test_a_tool_that_only_another_service_runs_is_left_out(kind: str) -> None:
    made = plan(tools=[{"type": kind}, tool("f")])
    assert [tool.name for tool in made.declared] == ["f"]
    assert made.ignored == ("tools[0]",)
    assert made.paths == ["tools[1].function"]
    assert plan(tools=[{"type": kind}]).mode == "none"
