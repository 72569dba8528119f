"""What drafts cost beyond their tokens, as steps tell it."""

from __future__ import annotations

import random

import pytest

from engine_core.speculation.drafting import Speculation
from engine_core.speculation.overhead import MIN_STEPS, DraftOverhead
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig

LINEAR = [(1, 1.0), (64, 64.0)]
FLAT = [(1, 1.0), (64, 1.0)]


def taught(plain_s: float, drafted_s: float, *, rows: int = 4, times: int = 40) -> DraftOverhead:
    overhead = DraftOverhead()
    for _ in range(times):
        overhead.observe(rows, 1.0, plain_s, is_drafted=False)
        overhead.observe(rows, 1.0, drafted_s, is_drafted=True)
    return overhead


def test_it_is_the_ratio_of_what_steps_took_for_their_cost() -> None:
    assert taught(0.010, 0.013)[4] == pytest.approx(1.3, rel=0.02)
    assert taught(0.010, 0.008)[4] == pytest.approx(0.8, rel=0.02)


def test_of_steps_of_which_only_one_kind_was_seen_nothing_is_known() -> None:
    overhead = DraftOverhead()
    for _ in range(50):
        overhead.observe(4, 1.0, 0.02, is_drafted=True)
    for _ in range(MIN_STEPS - 1):
        overhead.observe(4, 1.0, 0.01, is_drafted=False)
    assert overhead[4] == 1.0
    overhead.observe(4, 1.0, 0.01, is_drafted=False)
    assert overhead[4] == pytest.approx(2.0, rel=0.05)


def test_few_rows_say_nothing_of_many() -> None:
    overhead = taught(0.010, 0.020, rows=4)
    assert overhead[7] == overhead[4]
    assert overhead[1] == overhead[8] == 1.0


def test_costs_are_in_any_unit() -> None:
    one, other = DraftOverhead(), DraftOverhead()
    for _ in range(20):
        for overhead, unit in ((one, 1.0), (other, 1e-3)):
            overhead.observe(2, 1.0 * unit, 0.010, is_drafted=False)
            overhead.observe(2, 2.0 * unit, 0.030, is_drafted=True)
    assert one[2] == pytest.approx(other[2]) == pytest.approx(1.5, rel=0.05)


def test_a_step_that_others_held_up_changes_little() -> None:
    overhead = taught(0.010, 0.010)
    overhead.observe(4, 1.0, 5.0, is_drafted=True)
    assert overhead[4] < 1.1


def test_on_a_machine_of_moods_the_mean_is_near() -> None:
    chance, overhead = random.Random(3), DraftOverhead()
    for _ in range(400):
        overhead.observe(4, 1.0, 0.010 * chance.uniform(0.8, 1.4), is_drafted=False)
        overhead.observe(4, 1.0, 0.012 * chance.uniform(0.8, 1.4), is_drafted=True)
    assert 1.05 < overhead[4] < 1.35


def test_drafts_that_were_too_dear_are_tried_again_in_the_end() -> None:
    overhead = taught(0.010, 0.020)
    steps = 0
    while overhead[4] > 1.2:
        overhead.observe(4, 1.0, 0.010, is_drafted=False)
        steps += 1
    assert 200 < steps < 2000


def test_a_clock_that_stood_still_says_nothing() -> None:
    overhead = taught(0.010, 0.010)
    overhead.observe(4, 1.0, 0.0, is_drafted=True)
    assert overhead[4] == pytest.approx(1.0)


def worth_of(speculation: Speculation) -> int:
    return speculation._best_count(0.6, 4)


@pytest.mark.parametrize(("slower", "is_made"), [(1.0, True), (1.2, True), (2.5, False)])
def test_drafts_are_made_only_where_steps_with_them_are_worth_their_time(
    slower: float, is_made: bool
) -> None:
    config = EngineConfig(worker=WorkerConfig(model=""), max_drafts=8)
    speculation = Speculation(config, 0.0, FLAT)
    assert worth_of(speculation) > 0
    for _ in range(40):
        speculation.observe(4, 4, 0, 0.010)
        speculation.observe(4, 8, 0, 0.010 * slower)
    assert (worth_of(speculation) > 0) == is_made


def test_what_was_expected_of_a_step_is_no_stretch() -> None:
    """Twice the tokens at twice the cost, and a draft model's steps at theirs."""
    config = EngineConfig(worker=WorkerConfig(model=""), max_drafts=8)
    speculation = Speculation(config, 0.25, LINEAR)
    for _ in range(40):
        speculation.observe(4, 4, 0, 0.010)
        speculation.observe(4, 8, 2, 0.025)
    assert speculation._overhead[4] == pytest.approx(1.0)
