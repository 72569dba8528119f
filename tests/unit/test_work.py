"""No change makes a token cost more Python unnoticed: work is compared, not time.

After an intended change, `python -m tests.unit.test_work` records the counts anew; review the
difference of tests/data/work.json.
"""

from __future__ import annotations

import json

import pytest

from tests.support.work import RECORDED, SCENARIOS, CountedWork, Scenario, complaint, record


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_unit_of_work_is_no_more_calls_than_were_recorded(scenario: Scenario) -> None:
    recorded = json.loads(RECORDED.read_text())[scenario.name]
    told = complaint(scenario, recorded, scenario.work())
    assert told is None, told


def test_what_is_recorded_is_what_is_counted() -> None:
    assert set(json.loads(RECORDED.read_text())) == {scenario.name for scenario in SCENARIOS}


def test_the_same_run_is_the_same_count() -> None:
    assert SCENARIOS[0].work() == SCENARIOS[0].work()


def test_one_more_call_per_token_is_seen_and_named() -> None:
    scenario = SCENARIOS[0]
    now = scenario.work()
    name = next(name for name, count in now.items() if count >= 1)
    told = complaint(scenario, {**now, name: now[name] - 1}, now)
    assert told is not None
    assert f"-> {now[name]:8.2f}  {name}" in told
    assert "python -m tests.unit.test_work" in told
    assert complaint(scenario, {**now, name: now[name] + 1}, now) is None


def test_only_functions_of_our_rooms_are_counted() -> None:
    counted = CountedWork()
    with counted():
        json.dumps({"a": [1]})
    assert not counted.calls


if __name__ == "__main__":
    record()
