"""MiniMax-M3's and PLaMo 3's calls: events do not depend on how the answer is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.formats import named_json, nested_elements
from gateway.formats.named_json import plamo_begin, plamo_end
from gateway.formats.reasoning import THINK
from gateway.formats.registry import Format
from tests.support.format_tools import arguments_of, parsed_events, tool
from tests.support.formats import Call, Sample, check, dumps, reasoning_writer, written

NS = "]<]minimax[>["
STRING = {"type": "string"}
TREE = {"type": "object", "properties": {"b": {"type": "array"}, "語": STRING}}
MIXED = {"anyOf": [{"type": "number"}, {"type": "boolean"}, {"type": "null"}, {"type": "object"}]}
TREE["properties"]["b"]["items"] = MIXED | {"properties": {"c": {"type": "array"}}}  # type: ignore[index]
TOOLS = (
    tool("get_weather", city=STRING, days={"type": "integer"}),
    tool("now", tz=STRING),
    tool("f_1", a=TREE, n={"type": "number"}),
    tool("run", code=STRING, path=STRING, e=STRING),
    tool("types", l={"type": "array", "items": {"type": "integer"}}, o={"type": "object"}, z={}),
)


def element(name: str, value: Any) -> str:
    match value:
        case dict():
            inner = "".join(element(k, v) for k, v in value.items())
        case list():
            inner = "".join(element("item", item) for item in value)
        case str():
            inner = value
        case _:
            inner = dumps(value)
    return f"{NS}<{name}>{inner}{NS}</{name}>"


def minimax_m3(calls: Sequence[Call], before: int) -> str:
    def one(call: Call) -> str:
        body = "".join(element(key, value) for key, value in call.arguments.items())
        return f'{NS}<invoke name="{call.name}">\n{body}{NS}</invoke>\n'

    return f"{NS}<tool_call>\n{''.join(map(one, calls))}{NS}</tool_call>"


def plamo3(calls: Sequence[Call], before: int) -> str:
    def one(call: Call) -> str:
        name = plamo_begin("tool_name") + call.name + plamo_end("tool_name")
        arguments = plamo_begin("tool_arguments") + "<|plamo:constrain|>json<|plamo:msg|>"
        arguments += dumps(call.arguments) + plamo_end("tool_arguments")
        return plamo_begin("tool_request") + name + arguments + plamo_end("tool_request")

    return plamo_begin("tool_requests") + "".join(map(one, calls)) + plamo_end("tool_requests")


M3 = Sample(
    "minimax_m3",
    Format(nested_elements.FORMATS["minimax_m3"], THINK),
    minimax_m3,
    think=reasoning_writer(THINK),
    tags=(f"{NS}</item>", f"{NS}<tool_call>"),
    tools=TOOLS,
    parts=(NS,),
)
PLAMO = Sample(
    "plamo3",
    Format(named_json.FORMATS["plamo3"], THINK),
    plamo3,
    think=reasoning_writer(THINK),
    tags=(plamo_end("tool_arguments"),),
    parts=("<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<|plamo:constrain|>", "<|plamo:msg|>"),
)
SAMPLES = [M3, PLAMO]
EACH = pytest.mark.parametrize("sample", SAMPLES, ids=[s.name for s in SAMPLES])


def say(text: str, tools: Any = TOOLS) -> list[Any]:
    return parsed_events(M3, text, tools=tools, tokens=False)


def call(body: str) -> str:
    return f'{NS}<tool_call>{NS}<invoke name="types">{body}{NS}</invoke>{NS}</tool_call>'


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ({"l": [1, 2]}, {"l": [1, 2]}),
        ({"l": []}, {"l": []}),
        ({"o": {}}, {"o": {}}),
        ({"o": {"item": "a"}}, {"o": {"item": "a"}}),
        ({"z": {"item": "a"}}, {"z": ["a"]}),
        ({"z": "a <b>"}, {"z": "a <b>"}),
        ({"unheard_of": "12"}, {"unheard_of": "12"}),
    ],
)
def test_elements_get_the_types_of_the_schema(argument: Any, meant: Any) -> None:
    body = "".join(element(key, value) for key, value in argument.items())
    assert arguments_of(say(call(body))) == [meant]


def test_a_name_that_comes_again_makes_a_list() -> None:
    inner = element("a", 1) + element("b", 2) + element("a", 3)
    assert arguments_of(say(call(f"{NS}<o>{inner}{NS}</o>"))) == [{"o": {"a": [1, 3], "b": 2}}]


UNTYPED = {"n": 5, "f": -1.5, "b": True, "no": None, "s": "five", "l": [1, "a", False], "e": ""}


def test_a_nested_value_without_a_schema_has_the_type_of_its_json() -> None:
    for key in ("o", "unheard_of"):
        assert arguments_of(say(call(element(key, UNTYPED)))) == [{key: UNTYPED}]
    assert arguments_of(say(call(element("o", UNTYPED)), tools=None)) == [{"o": UNTYPED}]


def test_nested_values_without_a_schema_are_read_alike_however_they_are_cut() -> None:
    arguments = {"unheard_of": UNTYPED}
    untyped = replace(M3, name="minimax_m3 (untyped)")
    row = check(untyped, [written(untyped, "untyped", [[Call("types", arguments)]])])
    assert not row.differences, row.first
