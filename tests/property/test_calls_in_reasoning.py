"""Calls inside reasoning that the model did not close are calls, however the answer is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gateway.formats.call_parser import CallSyntax
from gateway.formats.event_builder import DeclaredTool
from gateway.formats.events import (
    Content,
    Event,
    Reasoning,
    ToolArguments,
    ToolCall,
    ToolCallEnd,
    merged,
)
from gateway.formats.lexicon import Lexicon
from gateway.formats.reasoning import REASONING
from gateway.formats.registry import TOOLS, BoundFormat, Format
from gateway.formats.standard import MAX_TRIAL_CHARS
from tests.property import (
    test_tools_arg_pairs,
    test_tools_gemma,
    test_tools_json,
    test_tools_nested,
    test_tools_pythonic,
    test_tools_xml,
)
from tests.support.format_tools import TYPED_TOOLS
from tests.support.formats import (
    Call,
    ContentPart,
    Fixture,
    Part,
    ReasoningPart,
    Sample,
    check,
    expected,
    read,
    seconds,
    units,
    vocabularies,
)

MODULES = (
    *(test_tools_json, test_tools_xml, test_tools_arg_pairs),
    *(test_tools_nested, test_tools_pythonic, test_tools_gemma),
)
IN_THE_OPEN = (
    *("llama3_json", "pythonic"),
    *("hammer", "hammer (fence)", "xlam", "xlam (fence)"),
)
"""Formats without a marker for calls. Only the start of an answer can be a call."""
SAMPLES = [
    replace(sample, tools=TYPED_TOOLS)
    for module in MODULES
    for sample in module.SAMPLES
    if sample.name not in IN_THE_OPEN
]
EACH = pytest.mark.parametrize("sample", SAMPLES, ids=[sample.name for sample in SAMPLES])
BLOCKS = {name: format for name, format in REASONING.items() if format.open}
WEATHER = Call("get_weather", {"city": "Oslo", "days": 3})


def test_no_format_with_a_marker_is_left_out() -> None:
    tried = {sample.format.tools for sample in SAMPLES}
    markers = {syntax.markers() for syntax in tried if syntax}
    for name, syntax in TOOLS.items():
        if isinstance(syntax, CallSyntax) and syntax.openers():
            assert syntax.markers() in markers, name


@EACH
def test_a_call_in_open_reasoning_is_a_call_in_every_pair_of_formats(sample: Sample) -> None:
    for name, reasoning in BLOCKS.items():
        both = replace(sample, format=Format(sample.format.tools, reasoning), markers=None)
        label = "".join(reasoning.label)
        text = f"{reasoning.open[0]}{label}\nhm\n{sample.write([WEATHER], 0)}"
        case = Fixture(name, text, expected(both, [ReasoningPart("hm"), [WEATHER]]))
        for words in vocabularies(both, case):
            pieces = units(case.text, words)
            for deltas in ([pieces], [[piece] for piece in pieces]):
                assert read(both, deltas, words, case) == case.events, name


def thinking(sample: Sample, parts: Sequence[Part], name: str, *, closed: str = "") -> Fixture:
    """Return an answer of one block of reasoning that contains all of `parts`. It ends with
    `closed`.
    """
    text, index = "<think>", 0
    for part in parts:
        match part:
            case ContentPart(said) | ReasoningPart(said):
                text += said
            case calls:
                text += sample.write(calls, index)
                index += len(calls)
    return Fixture(name, text + closed, expected(sample, parts))


def fixtures(sample: Sample) -> list[Fixture]:
    opener = sample.format.tools.openers()[0]  # type: ignore[union-attr]
    calls = [WEATHER, Call("now"), WEATHER]
    undeclared = sample.write([Call("elsewhere", {"a": "b"})], 0).strip()
    prose = f"Write {opener} and then a name, or {opener}</think>"
    return [
        thinking(sample, [ReasoningPart("hm"), [WEATHER]], "one call"),
        thinking(
            sample,
            [ReasoningPart("hm"), calls[: sample.max_calls], ReasoningPart("So.")],
            "three calls",
        ),
        Fixture(
            "closed behind the call",
            f"<think>hm\n{sample.write([WEATHER], 0)}\nSo.\n</think>\n\nDone.",
            expected(
                sample, [ReasoningPart("hm"), [WEATHER], ReasoningPart("So."), ContentPart("Done.")]
            ),
        ),
        Fixture(
            "a marker that opens nothing",
            f"<think>{prose}Done.",
            [Reasoning(prose.removesuffix("</think>")), Content("Done.")],
        ),
        Fixture(
            # a special token that is a part of markers has no text outside of them
            "prose" if sample.parts else "no tool of the request",
            f"<think>hm {undeclared}</think>Done.",
            [Reasoning(f"hm {undeclared}"), Content("Done.")],
        ),
    ]


@EACH
def test_the_way_an_answer_is_cut_never_changes_what_is_a_call_in_reasoning(sample: Sample) -> None:
    named = replace(sample, name=f"{sample.name} (in reasoning)")
    row = check(named, fixtures(sample))
    assert row.fixtures == 5
    assert not row.differences, row.first


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def said(text: str, *, tokens: bool, drafts: bool = False, complete: bool = True) -> list[Event]:
    format = Format(TOOLS["hermes"], REASONING["qwen3"])
    words = Lexicon(dict(enumerate(format.markers(), 1000)) if tokens else {})
    bound = BoundFormat(format, words)
    bound = bound.with_drafts() if drafts else bound
    machine = bound.parser(tools=[DeclaredTool("f")], new_id=lambda: "id")
    events = [event for piece in units(text, words) for event in machine.push(piece)]
    return merged(events + machine.finish(complete))


BOTH = pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "spelt"])


@BOTH
def test_a_call_in_reasoning_that_is_never_closed_is_a_call(tokens: bool) -> None:
    assert said(f"<think>\nhm\n{CALL}", tokens=tokens) == [
        Reasoning("hm"),
        ToolCall(0, "id", "f"),
        ToolArguments(0, '{"a": 1}'),
        ToolCallEnd(0),
    ]


@BOTH
def test_what_follows_a_call_in_reasoning_is_reasoning_until_it_is_closed(tokens: bool) -> None:
    events = said(f"<think>hm{CALL} More.</think>\n\nDone.", tokens=tokens)
    assert events[4:] == [Reasoning("More."), Content("Done.")]


@BOTH
def test_a_marker_in_the_prose_of_reasoning_is_text_without_a_warning(tokens: bool) -> None:
    for thought in (
        "write <tool_call> first",
        'not <tool_call>{"name": "g", "arguments": {}}</tool_call>',
        "<tool_call>",
        "<tool_call><tool_call> <tool_call>",
        '<tool_call>{"arguments": {"a": "' + "x" * MAX_TRIAL_CHARS + '"}, "name": "f"}',
    ):
        assert said(f"<think>{thought}</think>So.", tokens=tokens) == [
            Reasoning(thought),
            Content("So."),
        ]
        assert said(f"<think>{thought}", tokens=tokens) == [Reasoning(thought)]


@BOTH
def test_a_call_after_a_marker_that_was_text_is_found(tokens: bool) -> None:
    events = said(f"<think><tool_call><tool_call> or {CALL}", tokens=tokens)
    assert events[:2] == [Reasoning("<tool_call><tool_call> or "), ToolCall(0, "id", "f")]


@BOTH
def test_reasoning_is_held_back_no_longer_than_a_tool_can_still_be_named(tokens: bool) -> None:
    format = Format(TOOLS["hermes"], REASONING["qwen3"])
    words = Lexicon(dict(enumerate(format.markers(), 1000)) if tokens else {})
    machine = format.parser(words, tools=[DeclaredTool("f")])
    num_read = num_told = 0
    for piece in units('<think><tool_call>{"x": "' + "y" * 3 * MAX_TRIAL_CHARS, words):
        events = machine.push(piece)
        num_read += isinstance(piece, str)
        num_told += sum(len(event.text) for event in events if isinstance(event, Reasoning))
        assert num_read - num_told <= MAX_TRIAL_CHARS + len("<think><tool_call>")


@BOTH
def test_where_a_grammar_rules_the_answer_a_call_in_reasoning_is_a_draft(tokens: bool) -> None:
    text = f"<think>hm {CALL} or not</think>{CALL}"
    events = said(text, tokens=tokens, drafts=True)
    assert events[:2] == [Reasoning(f"hm {CALL} or not"), ToolCall(0, "id", "f")]


@BOTH
def test_half_a_call_at_the_end_of_reasoning_that_was_cut_off_is_not_shown(tokens: bool) -> None:
    for end in range(len("<tool_call>\n{")):
        text = "<think>so" + "<tool_call>\n{"[:end]
        if not tokens or end == 0 or end >= len("<tool_call>"):
            assert said(text, tokens=tokens, complete=False) == [Reasoning("so")]


@pytest.mark.parametrize(
    "part", ['<tool_call>{"a":"', "<tool_call>", '<tool_call>{"name', "<tool_"]
)
def test_no_reasoning_makes_reading_slow(part: str) -> None:
    sample = next(sample for sample in SAMPLES if sample.name == "hermes")
    for tokens in (True, False):
        short, long = ("<think>" + part * (size // len(part)) for size in (20_000, 80_000))
        most = 4 * 2.2 * seconds(sample, short, tokens=tokens, tries=3)
        assert any(seconds(sample, long, tokens=tokens) < most for _ in range(3))
