"""JSON-bodied calls: however the answer is cut, it says the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gateway.output.formats import TOOLS, Format
from gateway.output.reasoning import THINK
from tests.support.formats import (
    Call,
    Sample,
    check,
    content,
    cut_off,
    dumps,
    fixtures,
    reasoning_writer,
    table,
)


def hermes(calls: Sequence[Call], before: int) -> str:
    body = [dumps({"name": call.name, "arguments": call.arguments}) for call in calls]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in body)


SAMPLES = [
    Sample(
        name,
        Format(TOOLS[name], THINK),
        hermes,
        think=reasoning_writer(THINK),
        tags=("</tool_call>", "<tool_call>"),
    )
    for name in ("hermes",)
]
NAMES = [sample.name for sample in SAMPLES]


@pytest.mark.parametrize("sample", SAMPLES, ids=NAMES)
def test_the_way_an_answer_is_cut_never_changes_what_it_says(sample: Sample) -> None:
    row = check(sample, fixtures(sample))
    print("\n" + table([row]))
    assert row.fixtures >= 8
    assert not row.differences, row.first


@pytest.mark.parametrize("sample", SAMPLES, ids=NAMES)
def test_an_answer_cut_off_inside_a_call_shows_no_markup(sample: Sample) -> None:
    case = next(fixture for fixture in fixtures(sample) if fixture.name == "text before a call")
    said = content(case.events)
    for tokens in (True, False):
        for events in cut_off(sample, case, tokens=tokens):
            assert said.startswith(content(events).rstrip())
