"""Calls as pairs of keys and values: events do not depend on how the answer is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gateway.formats.arg_pairs import FORMATS, ArgPairs
from gateway.formats.lexicon import marker_suffix
from gateway.formats.reasoning import THINK
from gateway.formats.registry import Format
from tests.support.format_tools import TYPED_TOOLS, arguments_of, parsed_events, plain
from tests.support.formats import Call, Sample, dumps, reasoning_writer

Writer = Callable[[Sequence[Call], int], str]
TYPES = {str: "string", int: "integer", float: "number", dict: "object", list: "array"}


def pairs(x: ArgPairs, *, typed: bool = False) -> Writer:
    def one(call: Call) -> str:
        text = x.call_open + call.name + "".join(x.name_close) + "\n"
        for key, value in call.arguments.items():
            text += f"{x.key[0]}{key}{x.key[1]}\n"
            if typed:
                text += f"{x.type[0]}{TYPES[type(value)]}{x.type[1]}\n"
            text += f"{x.value[0]}{plain(value)}{x.value[1]}\n"
        return text + x.call_close

    def write(calls: Sequence[Call], before: int) -> str:
        return "\n".join((*x.open, *map(one, calls), *x.close))

    return write


def horizon_json(calls: Sequence[Call], before: int) -> str:
    x = FORMATS["k2_horizon"]
    body = (dumps({"name": call.name, "arguments": call.arguments}) for call in calls)
    return "\n".join(
        (*x.open, *(f"{x.call_open}\n{text}\n{x.call_close}" for text in body), *x.close)
    )


def sample(name: str, syntax: ArgPairs, write: Writer, *tags: str) -> Sample:
    return Sample(
        name,
        Format(syntax, THINK),
        write,
        think=reasoning_writer(THINK),
        tags=tags or (syntax.value[1], syntax.call_close),
        tools=TYPED_TOOLS,
    )


HY_V4 = FORMATS["hy_v4"].fitted(["<tool_calls:6124c78e>", "<arg_key:6124c78e>"])
K2 = FORMATS["k2_horizon"]
SAMPLES = [
    *(sample(name, FORMATS[name], pairs(FORMATS[name])) for name in ("glm45", "hy_v3", "hy_v4")),
    sample("hy_v4 with a suffix", HY_V4, pairs(HY_V4)),
    sample("k2_horizon xml", K2, pairs(K2)),
    sample("k2_horizon typed", K2, pairs(K2, typed=True)),
    sample("k2_horizon json", K2, horizon_json, K2.call_close),
]
EACH = pytest.mark.parametrize("sample", SAMPLES, ids=[s.name for s in SAMPLES])


def say(name: str, text: str, tools: Any = TYPED_TOOLS, tokens: bool = True) -> list[Any]:
    return parsed_events(
        sample(name, FORMATS[name], pairs(FORMATS[name])), text, tools=tools, tokens=tokens
    )


def one(value: str, key: str = "z", name: str = "types") -> str:
    body = f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"
    return f"<tool_call>{name}\n{body}\n</tool_call>"


@pytest.mark.parametrize(
    ("key", "written", "meant"),
    [
        ("i", "42", 42),
        ("i", "x", "x"),
        ("z", "42", 42),
        ("z", "x", "x"),
        ("z", '{"a": [1]}', {"a": [1]}),
        ("z", " kept ", " kept "),
        ("z", "a</arg_value> b", "a</arg_value> b"),
    ],
)
def test_a_value_is_typed_by_its_schema_or_is_json_if_it_can_be(
    key: str, written: str, meant: Any
) -> None:
    assert arguments_of(say("glm45", one(written, key), tokens=False)) == [{key: meant}]


def test_a_type_the_model_writes_decides_where_the_schema_does_not() -> None:
    def call(key: str, type_: str, value: str) -> str:
        body = f"<ifm|arg_key>{key}</ifm|arg_key><ifm|arg_type>{type_}</ifm|arg_type>"
        body += f"<ifm|arg_value>{value}</ifm|arg_value>"
        return f"<ifm|tool_calls><ifm|tool_call>types{body}</ifm|tool_call></ifm|tool_calls>"

    assert arguments_of(say("k2_horizon", call("i", "string", "42"))) == [{"i": "42"}]
    assert arguments_of(say("k2_horizon", call("z", "list[int]", "[1]"))) == [{"z": [1]}]
    assert arguments_of(say("k2_horizon", call("z", "string", "[1]"))) == [{"z": "[1]"}]
    assert arguments_of(say("k2_horizon", call("b", "string", "true"))) == [{"b": True}]


def test_a_suffix_is_found_in_the_vocabulary() -> None:
    assert marker_suffix(["<s>", "<tool_calls:6124c78e>", "a"]) == ":6124c78e"
    assert marker_suffix(["<s>", "<tool_calls>"]) == ""
    assert HY_V4.key == ("<arg_key:6124c78e>", "</arg_key:6124c78e>")
