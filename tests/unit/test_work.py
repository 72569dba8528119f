"""The calls of our functions per unit of work. A change that adds calls is noticed without a clock.

After an intended change, `python -m tests.unit.test_work` records the counts anew; review the
difference of tests/data/work.json.
"""

from __future__ import annotations

import json

import pytest

from tests.support.work import RECORDED, SCENARIOS, Scenario, complaint, record


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_unit_of_work_makes_no_more_calls_than_recorded(scenario: Scenario) -> None:
    recorded = json.loads(RECORDED.read_text())[scenario.name]
    found = complaint(scenario, recorded, scenario.work())
    assert found is None, found


def test_every_scenario_has_recorded_calls() -> None:
    assert set(json.loads(RECORDED.read_text())) == {scenario.name for scenario in SCENARIOS}


if __name__ == "__main__":
    record()
