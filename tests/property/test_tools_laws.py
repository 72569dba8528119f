"""Laws that hold for every syntax of calls. What only one syntax does is tested in its own file."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gateway.formats.events import OutputWarning, ToolArguments, ToolCall, ToolCallEnd, merged
from tests.property.test_tools_nested import NS
from tests.property.tool_samples import BY_NAME, EACH, SAMPLES
from tests.support.cuts import at_random
from tests.support.examples import examples
from tests.support.format_tools import TYPED_TOOLS, parsed_events
from tests.support.formats import (
    Call,
    Fixture,
    Reading,
    Sample,
    check,
    content,
    cut_off,
    difference,
    lexicon,
    read,
    units,
    vocabularies,
)


@EACH
def test_the_cut_of_an_answer_never_changes_the_events(
    sample: Sample, cases: Sequence[Fixture]
) -> None:
    row = check(sample, cases)
    assert row.fixtures >= 8
    assert not row.differences, row.first


ENDS_WITH_BLANKS = {"ernie45", "hammer", "functionary_v22"}
"""Names of the samples that write line breaks between a text and a call, which are not content."""
CUT_OFF = ("one call", "text before a call", "reasoning before")


@EACH
def test_an_answer_cut_off_anywhere_shows_no_markup(
    sample: Sample, cases: Sequence[Fixture]
) -> None:
    for case in cases:
        for tokens in (True, False) if case.name in CUT_OFF else ():
            for events in cut_off(sample, case, tokens=tokens):
                shown = content(events)
                if sample.name in ENDS_WITH_BLANKS:
                    shown = shown.rstrip()
                assert content(case.events).startswith(shown)


@EACH
def test_a_call_has_an_end_only_if_its_arguments_are_whole(
    sample: Sample, cases: Sequence[Fixture]
) -> None:
    case = next(case for case in cases if case.name == "one call")
    (whole,) = (event for event in case.events if isinstance(event, ToolArguments))
    for words in vocabularies(sample, case):
        pieces = units(case.text, words)
        for end in range(len(pieces)):
            events = read(sample, [pieces[:end]], words, case)
            if any(isinstance(event, ToolCallEnd) for event in events):
                assert whole in events
            elif any(isinstance(event, ToolCall) for event in events):
                assert isinstance(events[-1], OutputWarning)


@EACH
def test_a_string_is_emitted_while_it_is_written(sample: Sample, cases: Sequence[Fixture]) -> None:
    case = next(case for case in cases if case.name == "one call")
    for words in vocabularies(sample, case):
        reading = Reading(sample, words, case)
        reading.push(units(case.text.partition("Oslo")[0], words))
        reading.events.clear()
        reading.push("Osl")
        assert merged(reading.events) == [ToolArguments(0, "Osl")]


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("gemma4", '<|tool_call>call:run{code:<|"|>'),
        (
            "kimi_k3",
            '<|open|>tools<|sep|><|open|>call tool="f"<|sep|><|open|>argument key="k"<|sep|>',
        ),
        ("minimax_m3", f'{NS}<tool_call>{NS}<invoke name="run">{NS}<code>'),
        ("qwen3_coder", "<tool_call><function=run><parameter=code>"),
    ],
)
def test_quotes_are_escaped_while_a_string_is_written(name: str, start: str) -> None:
    sample = SAMPLES[name]
    machine = sample.format.parser(lexicon(sample, tokens=False), tools=sample.tools or TYPED_TOOLS)
    machine.push(start)
    assert machine.push('print("hi")') == [ToolArguments(0, 'print(\\"hi\\")')]


NO_CALLS = {
    "gemma4": ("<|tool_call> is a tag", "<|tool_call>", "<|tool_call><tool_call|>"),
    "glm45": ("the <tool_call> tag is used", "<tool_call></tool_call>", "<tool_call>\n\n"),
    "minimax_m3": tuple(
        f"{NS}<tool_call>{rest}"
        for rest in (" hm", f"{NS}</tool_call>", "", NS, f"{NS}<b>", f"{NS}x")
    ),
    "mistral": ("[TOOL_CALLS] is a marker",),
    "qwen3_coder": (
        "<tool_call>hm</tool_call>",
        "<tool_call>\n<function=\n>",
        "<tool_call>",
        "<tool_call></tool_call>",
    ),
}
"""Texts with a marker of calls, but without a call, by the name of the sample."""


@pytest.mark.parametrize(("name", "text"), [(n, text) for n, ts in NO_CALLS.items() for text in ts])
def test_a_marker_with_no_call_after_it_is_content_with_a_warning(name: str, text: str) -> None:
    sample = SAMPLES[name]
    events = parsed_events(sample, text, tools=sample.tools or TYPED_TOOLS, tokens=False)
    assert content(events) == text
    assert any(isinstance(event, OutputWarning) for event in events)
    assert not any(isinstance(event, ToolCall) for event in events)


NUM_TEXTS = examples(20, 1000)
ANYWHERE = (*"\"'{}[]()<>:=,;.\\", " ", "\n", "a b", "7", "true", "r'", "''", "\n\n", "語")
"""Pieces that may stand anywhere in an answer."""


def scraps(sample: Sample) -> list[str]:
    """Return the pieces of two calls: markers, words and signs."""
    text = sample.write([Call("run", {"code": "x", "e": "y"}), Call("now")][: sample.max_calls], 0)
    markers = sorted(sample.format.markers(), key=len, reverse=True)
    return re.findall("|".join([*map(re.escape, markers), r"\w+|\s|[^\w\s]+"]), text)


@BY_NAME
def test_the_meaning_of_scraps_of_calls_does_not_depend_on_the_cut(name: str) -> None:
    sample = replace(SAMPLES[name], tools=TYPED_TOOLS)
    rng = random.Random(name)
    pieces = scraps(sample)
    for _ in range(NUM_TEXTS):
        start = rng.randint(0, len(pieces))  # scraps in their order lead into all states
        text = "".join([*pieces[:start], *rng.choices([*pieces, *ANYWHERE], k=rng.randint(1, 25))])
        case = Fixture("scraps", text, [], complete=rng.random() < 0.8)
        for tokens in (True, False)[: 1 + sample.spelt_ok]:
            words = lexicon(sample, tokens=tokens)
            found = units(text, words)
            case = replace(case, events=read(sample, [found], words, case))
            for deltas in ([[unit] for unit in found], at_random(found, rng)):
                said = read(sample, deltas, words, case)
                assert said == case.events, difference(case, deltas, said)
