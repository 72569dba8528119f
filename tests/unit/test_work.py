"""No change makes a token cost more Python unnoticed: work is compared, not time.

After an intended change, `python -m tests.unit.test_work` records the counts anew; review the
difference of tests/data/work.json.
"""

from __future__ import annotations

import json

import pytest

from tests.support.work import RECORDED, SCENARIOS, Scenario, complaint, record


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_unit_of_work_is_no_more_calls_than_were_recorded(scenario: Scenario) -> None:
    recorded = json.loads(RECORDED.read_text())[scenario.name]
    told = complaint(scenario, recorded, scenario.work())
    assert told is None, told


def test_what_is_recorded_is_what_is_counted() -> None:
    assert set(json.loads(RECORDED.read_text())) == {scenario.name for scenario in SCENARIOS}


if __name__ == "__main__":
    record()
