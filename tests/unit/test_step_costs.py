"""What a step costs by its tokens, and how many drafts that makes worth while."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine_core.speculation.drafting import Speculation
from engine_core.speculation.step_costs import UNMEASURED_WIDTH, StepCosts
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig

MEASURED = [(1, 4.0), (4, 4.0), (8, 6.0), (16, 10.0), (64, 40.0)]


def worth(
    chance: float, rows: int, costs: Sequence[tuple[int, float]] = MEASURED, **more: Any
) -> int:
    config = EngineConfig(worker=WorkerConfig(model=""), max_drafts=8, **more)
    return Speculation(config, 0.0, costs)._best_count(chance, rows)


@pytest.mark.parametrize(
    ("tokens", "cost"), [(1, 4), (3, 4), (4, 4), (6, 5), (8, 6), (64, 40), (80, 50)]
)
def test_costs_lie_on_straight_lines(tokens: int, cost: float) -> None:
    costs = StepCosts(MEASURED)
    assert costs[tokens] == pytest.approx(cost)
    assert costs[tokens] == pytest.approx(cost), "asked again"


def test_one_measurement_is_all_there_is() -> None:
    assert StepCosts([(2, 3.0)])[100] == 3.0


def test_a_width_that_is_told_stands_above_what_is_measured() -> None:
    assert StepCosts.from_measurements(0, MEASURED)[1] == 4.0
    told, unknown = StepCosts.from_measurements(16, MEASURED), StepCosts.from_measurements(0, [])
    assert told[16] == 2.0
    assert unknown[UNMEASURED_WIDTH] == 2.0
    assert unknown[2 * UNMEASURED_WIDTH] == pytest.approx(3.0)


def test_drafts_that_cost_nothing_are_made_if_they_are_likely_at_all() -> None:
    assert worth(0.5, 1, [(1, 1.0), (256, 1.0)]) == 2, "the third has a chance of an eighth"
    assert worth(1.0, 1, [(1, 1.0), (256, 1.0)]) == 8
    assert worth(0.1, 1, [(1, 1.0), (256, 1.0)]) == 0


def test_where_each_token_costs_as_much_as_the_first_no_draft_is_made() -> None:
    dear = [(1, 1.0), (256, 256.0)]
    assert [worth(0.99, rows, dear) for rows in (1, 4, 32)] == [0, 0, 0]


def test_the_number_of_drafts_is_that_of_most_tokens_for_their_cost() -> None:
    """Two rows: one draft each is free; two and three cost half as much as a token alone."""
    by_hand = {
        n: sum(0.7**i for i in range(n + 1)) / StepCosts(MEASURED)[2 * (1 + n)] for n in range(5)
    }
    assert worth(0.7, 2) == max(by_hand, key=by_hand.__getitem__) > 0


def test_a_step_that_is_full_gets_fewer() -> None:
    counts = [worth(0.8, rows) for rows in (1, 4, 16, 64)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 0


def test_a_draft_models_own_cost_counts() -> None:
    config = EngineConfig(worker=WorkerConfig(model=""), max_drafts=8)
    counts = [
        Speculation(config, 0.0, MEASURED)._best_count(0.8, 1, cost) for cost in (0.0, 0.2, 0.9)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 0
