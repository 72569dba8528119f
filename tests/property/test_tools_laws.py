"""Laws that hold for every syntax of calls. What only one syntax does is tested in its own file."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gateway.formats.events import OutputWarning, ToolArguments, ToolCall, ToolCallEnd, merged
from tests.property import (
    test_tools_arg_pairs,
    test_tools_functionary,
    test_tools_gemma,
    test_tools_json,
    test_tools_messages,
    test_tools_nested,
    test_tools_pythonic,
    test_tools_response_template,
    test_tools_xml,
    test_tools_xtml,
)
from tests.support.format_tools import TYPED_TOOLS, parsed_events
from tests.support.formats import (
    Fixture,
    Reading,
    Sample,
    check,
    content,
    cut_off,
    fixtures,
    lexicon,
    read,
    units,
    vocabularies,
)

ANSWERS: list[tuple[Sample, Sequence[Fixture]]] = [
    *(
        (sample, fixtures(sample))
        for module in (
            test_tools_json,
            test_tools_arg_pairs,
            test_tools_gemma,
            test_tools_nested,
            test_tools_xml,
        )
        for sample in module.SAMPLES
    ),
    *((sample, test_tools_pythonic.cases(sample)) for sample in test_tools_pythonic.SAMPLES),
    *((sample, test_tools_messages.cases(sample)) for sample in test_tools_messages.SAMPLES),
    *((sample, test_tools_functionary.cases(sample)) for sample in test_tools_functionary.SAMPLES),
    (test_tools_xtml.K3, test_tools_xtml.cases()),
]
"""(sample, answers) of every syntax that has a name."""
SAMPLES = {sample.name: sample for sample, _ in ANSWERS}
FROM_TEMPLATES = [
    (sample, test_tools_response_template.cases(sample))
    for sample in test_tools_response_template.SAMPLES
]
"""(sample, answers) of syntaxes that a checkpoint describes."""
EACH = pytest.mark.parametrize(
    ("sample", "cases"),
    [pytest.param(*answer, id=answer[0].name) for answer in ANSWERS]
    + [pytest.param(*answer, id=f"{answer[0].name} (template)") for answer in FROM_TEMPLATES],
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


NS = test_tools_nested.NS


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
