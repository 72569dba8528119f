"""For every syntax, events do not depend on how the text of an answer is cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

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
from tests.support.formats import Fixture, Sample, check, content, cut_off, fixtures

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


@EACH
def test_an_answer_cut_off_anywhere_shows_no_markup(
    sample: Sample, cases: Sequence[Fixture]
) -> None:
    by_name = {case.name: case for case in cases}
    case = by_name.get("text before a call") or by_name["one call"]
    said = content(case.events)
    for tokens in (True, False):
        for events in cut_off(sample, case, tokens=tokens):
            assert said.startswith(content(events).rstrip())
