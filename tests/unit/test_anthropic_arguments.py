"""The arguments emitted for a tool call are a JSON object, even if the model's text is not one. All
that is emitted before the end is the start of this object."""

from __future__ import annotations

import json
from typing import Any

import jiter
import pytest

from gateway.api.anthropic.blocks import ToolInput
from gateway.formats.events import INVALID_JSON
from gateway.formats.readable_json import MAX_NUMBER_CHARS


def emitted(*bits: str, complete: bool = True) -> str:
    arguments = ToolInput()
    return "".join(map(arguments.push, bits)) + arguments.finish(complete=complete)


OBJECTS = [
    "{}",
    " { } \n",
    '{"city": "Köln"}',
    '{"a":[1,-2.5e+3,true,false,null,"x",[],{},[[{"b":{}}]]],"c":{"d":""}}',
    '{"quote":"\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9","pair":"\\ud83d\\ude00"}',
    '{"a" : 0 , "b" : [ ] }',
    '{"": ""}',
]


@pytest.mark.parametrize("text", OBJECTS)
def test_an_object_is_emitted_unchanged_however_it_is_split(text: str) -> None:
    assert emitted(text).strip() == text.strip()
    assert emitted(*text) == emitted(text)


def test_the_text_of_a_string_is_emitted_at_once() -> None:
    arguments = ToolInput()
    assert arguments.push('{"content": "one ') == '{"content": "one '
    assert arguments.push("two") == "two"
    assert arguments.push(' "') == ' "'
    assert arguments.push("}") == ""
    assert arguments.finish(complete=True) == "}"


BROKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "no object": ("hello", {}),
    "a list": ("[1]", {}),
    "a string": ('"text"', {}),
    "half an object": ('{"a": 1, "b', {"a": 1}),
    "half a string": ('{"a": "one', {"a": "one"}),
    "half a number": ('{"a": 12', {}),
    "no key": ("{a: 1}", {}),
    "single quotes": ("{'a': 1}", {}),
    "comma at the end": ('{"a": [1,], "b": 2}', {"a": [1]}),
    "wrong bracket": ('{"a": [1}', {"a": [1]}),
    "words behind": ('{"a": 1} done', {"a": 1}),
    "two objects": ('{"a": 1}{"b": 2}', {"a": 1}),
    "a number behind": ('{"a": 1} 2', {"a": 1}),
    "Python": ('{"a": True}', {}),
    "NaN": ('{"a": {"b": NaN}}', {"a": {}}),
    "leading zero": ('{"a": 01}', {}),
    "escape": ('{"a": "x\\qy and more than twelve"}', {"a": "x"}),
    "lone surrogate": ('{"a": "x\\ud83d and more"}', {"a": "x"}),
    "endless number": ('{"a": ' + "1" * (MAX_NUMBER_CHARS + 2) + "}", {}),
    "brace at the start": ("}", {}),
    "nothing": ("", {}),
}


@pytest.mark.parametrize("case", BROKEN)
def test_invalid_json_is_closed_and_added_as_text(case: str) -> None:
    text, before = BROKEN[case]
    assert json.loads(emitted(text)) == {**before, INVALID_JSON: text}
    assert emitted(*text) == emitted(text)


@pytest.mark.parametrize("case", BROKEN)
def test_an_object_that_was_cut_off_is_closed(case: str) -> None:
    text, before = BROKEN[case]
    whole = json.loads(emitted(text, complete=False))
    assert {name: whole[name] for name in before} == before
    assert emitted(*text, complete=False) == emitted(text, complete=False)


@pytest.mark.parametrize("text", OBJECTS)
def test_an_object_cut_off_anywhere_is_not_reported_as_invalid(text: str) -> None:
    for end in range(len(text)):
        assert INVALID_JSON not in json.loads(emitted(text[:end], complete=False))


@pytest.mark.parametrize("text", [*OBJECTS, *(text for text, _ in BROKEN.values())])
def test_an_incremental_json_parser_never_fails(text: str) -> None:
    arguments = ToolInput()
    so_far = ""
    for char in text:
        so_far += arguments.push(char)
        if so_far:
            jiter.from_json(so_far.encode(), partial_mode=True)
    whole = jiter.from_json((so_far + arguments.finish(complete=True)).encode())
    assert isinstance(whole, dict)


def test_raw_newlines_in_a_string_are_escaped() -> None:
    assert json.loads(emitted('{"code": "one\n\ttwo\x00"}')) == {"code": "one\n\ttwo\x00"}
