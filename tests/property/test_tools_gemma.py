"""Gemma's calls: events do not depend on how the answer is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.formats.events import Content, OutputWarning, ToolArguments, ToolCall, ToolCallEnd
from gateway.formats.gemma import FORMATS, Gemma
from gateway.formats.reasoning import THINK
from gateway.formats.registry import Format
from tests.support.format_tools import TYPED_TOOLS, arguments_of, parsed_events
from tests.support.formats import (
    Call,
    Fixture,
    Sample,
    dumps,
    lexicon,
    read,
    reasoning_writer,
    units,
)


def literal(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            return "{" + ",".join(f"{k}:{literal(v, quote)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ",".join(literal(item, quote) for item in value) + "]"
    return dumps(value)


def writer(x: Gemma) -> Callable[[Sequence[Call], int], str]:
    return lambda calls, before: "".join(
        f"{x.open}call:{call.name}{literal(call.arguments, x.quote)}{x.close}" for call in calls
    )


SAMPLES = [
    Sample(
        name,
        Format(syntax, THINK),
        writer(syntax),
        think=reasoning_writer(THINK),
        tags=(syntax.close, syntax.open),
    )
    for name, syntax in FORMATS.items()
]
EACH = pytest.mark.parametrize("sample", SAMPLES, ids=[s.name for s in SAMPLES])


def say(text: str, tools: Any = TYPED_TOOLS, tokens: bool = True) -> list[Any]:
    return parsed_events(SAMPLES[0], text, tools=tools, tokens=tokens)


def call(body: str) -> str:
    return f"<|tool_call>{body}<tool_call|>"


@pytest.mark.parametrize(
    ("body", "meant"),
    [
        ('call:types{z:<|"|>a, {b}<|"|>}', {"z": "a, {b}"}),
        ("call:types{z:text, b:true}", {"z": "text", "b": True}),
        ('call:types{b:<|"|>true<|"|>,i:<|"|>4<|"|>}', {"b": True, "i": "4"}),
        ('call:types{<|"|>odd key<|"|>:1}', {"odd key": 1}),
        ("call:types { z : 1 , }", {"z": 1}),
        (":types(z:1)", {"z": 1}),
        ("call:now{}", {}),
        ("call:types{z:[],l:[{},[1,2]]}", {"z": [], "l": [{}, [1, 2]]}),
    ],
)
def test_an_object_without_quotes_becomes_json(body: str, meant: Any) -> None:
    events = say(call(body))
    assert arguments_of(events) == [meant]
    assert isinstance(events[-1], ToolCallEnd)


QUOTED = [
    ('{city:"Oslo, Norway",z:[1,"a"]}', {"city": "Oslo, Norway", "z": [1, "a"]}),
    ('{z:["x","y, {z}"],at:{a:"b: c"}}', {"z": ["x", "y, {z}"], "at": {"a": "b: c"}}),
    ('{"z": "a \\"b\\" \\u00e9", "b": true}', {"z": 'a "b" é', "b": True}),
    ('{z:"two\nlines \\d"}', {"z": "two\nlines \\d"}),
    ('{b:"true",i:"4",z:""}', {"b": True, "i": "4", "z": ""}),
    ('{z:"\\ud83d\\ude00"}', {"z": "😀"}),
    ('{z:5" pipe}', {"z": '5" pipe'}),
    ("{city:'Oslo, Norway',z:[1,'a']}", {"city": "Oslo, Norway", "z": [1, "a"]}),
    ("{'z': 'it's, {y}', 'b': true}", {"z": "it's, {y}", "b": True}),
    ("{z:'a \\'b\\'\\n\\d \\\\', at:{a:''}}", {"z": "a 'b'\n\\d \\", "at": {"a": ""}}),
    ("{b:'true',i:'4', z:it's}", {"b": True, "i": "4", "z": "it's"}),
    ("{z='a', i=[1,2], b=true, at={a=1}}", {"z": "a", "i": [1, 2], "b": True, "at": {"a": 1}}),
    ("(z='a', i=4, l=[{a=1}])", {"z": "a", "i": 4, "l": [{"a": 1}]}),
    ('{z:"a=b", at:{y:a=b}}', {"z": "a=b", "at": {"y": "a=b"}}),
]


@pytest.mark.parametrize(("body", "meant"), QUOTED)
@EACH
def test_a_string_in_ordinary_quotes_has_none_of_them(
    sample: Sample, body: str, meant: Any
) -> None:
    x = sample.format.tools
    assert isinstance(x, Gemma)
    for tokens in (True, False):
        words = lexicon(sample, tokens=tokens)
        pieces = units(f"{x.open}call:types{body}{x.close}", words)
        typed, case = replace(sample, tools=TYPED_TOOLS), Fixture("", "", [])
        told = [
            read(typed, deltas, words, case)
            for deltas in ([pieces], [[p] for p in pieces], *cuts_in_two(pieces))
        ]
        told.append(read(typed, [[p] for p in pieces], words, case, moving=True))
        assert arguments_of(told[0]) == [meant]
        assert all(events == told[0] for events in told)


def cuts_in_two(pieces: list[Any]) -> list[list[list[Any]]]:
    return [[pieces[:at], pieces[at:]] for at in range(1, len(pieces))]


def test_a_quoted_string_that_is_not_closed_ends_with_the_call() -> None:
    events = say(call('call:types{z:"a'))
    assert [type(e) for e in events] == [ToolCall, ToolArguments, OutputWarning, ToolCallEnd]


def test_arguments_that_are_not_an_object_stay_unchanged_with_a_warning() -> None:
    events = say(call("call:f{a:1 {}}"))
    assert [type(e) for e in events][-2:] == [OutputWarning, ToolCallEnd]


def test_content_continues_after_a_call_that_is_not_closed() -> None:
    assert say("<|tool_call>call:now{} Done.")[-1] == Content("Done.")
