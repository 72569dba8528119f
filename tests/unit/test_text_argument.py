"""The text of a call that has one text is read from the JSON of its arguments."""

from __future__ import annotations

import json
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.formats.event_builder import DeclaredTool
from gateway.formats.events import (
    Event,
    Finished,
    ToolArguments,
    ToolCall,
    ToolCallEnd,
    ToolText,
    merged,
)
from gateway.formats.lexicon import Lexicon
from gateway.formats.registry import TOOLS, Format, parser_state
from gateway.formats.text_argument import TextArgument

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def read(source: str, cuts: list[int]) -> tuple[str, str]:
    """Return (the text before the end of the call, the rest). The scan is restored at each cut."""
    text, state = "", TextArgument()
    places = [0, *sorted(cut % (len(source) + 1) for cut in cuts), len(source)]
    for start, end in pairwise(places):
        text += state.push(source[start:end])
        state = msgspec.convert(msgspec.to_builtins(state), TextArgument)
    return text, state.finish()


@given(TEXT, st.booleans(), st.lists(st.integers(0, 999), max_size=9))
def test_a_text_is_read_however_it_is_cut(text: str, ascii: bool, cuts: list[int]) -> None:
    source = ' { "input" :\n' + json.dumps(text, ensure_ascii=ascii) + ', "more": "x" } '
    assert read(source, cuts) == (text, "")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('{"patch": "a"}', "a"),
        ('{"patch": "a", "b": "c"}', '{"patch": "a", "b": "c"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('"a"', "a"),
        ("{}", ""),
        ("[1]", "[1]"),
        ("{not JSON", "{not JSON"),
        ('{  "in  put" : "a", "b": 1}', '{  "in  put" : "a", "b": 1}'),
    ],
)
def test_other_arguments_are_not_lost(source: str, text: str) -> None:
    for cut in range(len(source)):
        assert read(source, [cut]) == ("", text)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (r'{"input": "a\ud83d', "a"),
        (r'{"input": "a\ud83d"}', "a\N{REPLACEMENT CHARACTER}"),
        (r'{"input": "a\ud83dx"}', "a\N{REPLACEMENT CHARACTER}x"),
        (r'{"input": "a\ud83d\n"}', "a\N{REPLACEMENT CHARACTER}\n"),
        (r'{"input": "a\u12', "a"),
        (r'{"input": "a\q"}', "a\\q"),
        ('{"input": "a', "a"),
    ],
)
def test_a_broken_text_is_read_as_far_as_possible(source: str, text: str) -> None:
    for cut in range(len(source)):
        assert read(source, [cut])[0] == text


TOOL = DeclaredTool("note", {"type": "object"}, takes_text=True)
CALL = '<tool_call>\n{"name": "note", "arguments": {"input": "a\\nb"}}\n</tool_call>'


def events(text: str, *, complete: bool, size: int) -> list[Event]:
    format, found = Format(TOOLS["hermes"]), list[Event]()
    state = None
    for start in range(0, len(text), size):
        parser = format.parser(
            Lexicon(), tools=[TOOL, DeclaredTool("f")], new_id=lambda: "id", state=state
        )
        found += parser.push(text[start : start + size])
        state = parser_state(parser)
    parser = format.parser(Lexicon(), tools=[TOOL, DeclaredTool("f")], state=state)
    return merged([*found, *parser.finish(complete)])


@pytest.mark.parametrize("size", [1, 3, 7, 999])
def test_a_call_of_one_text_has_its_text_and_other_calls_their_arguments(size: int) -> None:
    both = CALL + CALL.replace("note", "f")
    assert events(both, complete=True, size=size) == [
        ToolCall(0, "id", "note", is_text=True),
        ToolText(0, "a\nb"),
        ToolCallEnd(0),
        ToolCall(1, "id", "f"),
        ToolArguments(1, '{"input": "a\\nb"}'),
        ToolCallEnd(1),
    ]


@pytest.mark.parametrize("size", [1, 3, 999])
def test_other_arguments_that_are_cut_off_are_not_lost(size: int) -> None:
    source = CALL.replace('"input": "a\\nb"', '"patch": "a", "b": 1')
    found = events(source[: source.index(', "b"')], complete=False, size=size)
    assert found[:2] == [ToolCall(0, "id", "note", is_text=True), ToolText(0, '{"patch": "a"')]


@pytest.mark.parametrize("size", [1, 3, 999])
def test_a_call_that_is_cut_off_has_no_end(size: int) -> None:
    found = events(CALL[: CALL.index("b")], complete=False, size=size)
    assert found[:2] == [ToolCall(0, "id", "note", is_text=True), ToolText(0, "a\n")]
    assert not any(isinstance(event, ToolCallEnd | Finished) for event in found)
