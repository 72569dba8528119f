"""The samples of all syntaxes of calls, each with the answers that it can write."""

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
from tests.support.formats import Fixture, Sample, fixtures

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
SAMPLES = {sample.name: sample for sample, _ in ANSWERS} | {
    f"{sample.name} (template)": sample for sample, _ in FROM_TEMPLATES
}
BY_NAME = pytest.mark.parametrize("name", SAMPLES)
EACH = pytest.mark.parametrize(("sample", "cases"), [*ANSWERS, *FROM_TEMPLATES], ids=list(SAMPLES))
