"""The cost of drafts, their best number, and n-gram lookup compared with a full search."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest

from engine_core.speculation.draft_policy import Speculation
from engine_core.speculation.ngram import CATCH_UP, MAX_CANDIDATES, NgramDrafter
from engine_core.speculation.overhead import MIN_STEPS, DraftOverhead
from engine_core.speculation.step_costs import UNMEASURED_WIDTH, StepCosts
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig

# ---- the cost of a step
MEASURED = [(1, 4.0), (4, 4.0), (8, 6.0), (16, 10.0), (64, 40.0)]


def worth(
    chance: float, rows: int, costs: Sequence[tuple[int, float]] = MEASURED, **more: Any
) -> int:
    config = EngineConfig(worker=WorkerConfig(model=""), max_drafts=8, **more)
    return Speculation(config, 0.0, costs).best_count(chance, rows)


@pytest.mark.parametrize(
    ("tokens", "cost"), [(1, 4), (3, 4), (4, 4), (6, 5), (8, 6), (64, 40), (80, 50)]
)
def test_step_costs_are_interpolated(tokens: int, cost: float) -> None:
    costs = StepCosts(MEASURED)
    assert costs[tokens] == pytest.approx(cost)
    assert costs[tokens] == pytest.approx(cost), "the cost is cached"


def test_a_single_measurement_holds_for_every_size() -> None:
    assert StepCosts([(2, 3.0)])[100] == 3.0


def test_a_configured_width_overrides_measured_costs() -> None:
    assert StepCosts.from_measurements(0, MEASURED)[1] == 4.0
    configured = StepCosts.from_measurements(16, MEASURED)
    assert configured[16] == 2.0
    unknown = StepCosts.from_measurements(0, [])
    assert unknown[UNMEASURED_WIDTH] == 2.0
    assert unknown[2 * UNMEASURED_WIDTH] == pytest.approx(3.0)


def test_free_drafts_are_made_if_they_are_likely() -> None:
    assert worth(0.5, 1, [(1, 1.0), (256, 1.0)]) == 2, (
        "the third draft is right with probability 1/8"
    )
    assert worth(1.0, 1, [(1, 1.0), (256, 1.0)]) == 8
    assert worth(0.1, 1, [(1, 1.0), (256, 1.0)]) == 0


def test_no_draft_is_made_if_each_token_costs_as_much_as_the_first() -> None:
    expensive = [(1, 1.0), (256, 256.0)]
    assert [worth(0.99, rows, expensive) for rows in (1, 4, 32)] == [0, 0, 0]


def test_the_number_of_drafts_maximises_tokens_per_cost() -> None:
    """The expected number of tokens per cost of a step is computed for 0 to 4 drafts per row."""
    by_hand = {
        n: sum(0.7**i for i in range(n + 1)) / StepCosts(MEASURED)[2 * (1 + n)] for n in range(5)
    }
    assert worth(0.7, 2) == max(by_hand, key=by_hand.__getitem__) > 0


def test_a_full_step_gets_fewer_drafts() -> None:
    counts = [worth(0.8, rows) for rows in (1, 4, 16, 64)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 0


def test_a_draft_models_own_cost_counts() -> None:
    config = EngineConfig(worker=WorkerConfig(model=""), max_drafts=8)
    counts = [
        Speculation(config, 0.0, MEASURED).best_count(0.8, 1, cost) for cost in (0.0, 0.2, 0.9)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 0


# ---- the overhead of drafts
LINEAR = [(1, 1.0), (64, 64.0)]
FLAT = [(1, 1.0), (64, 1.0)]


def observed(plain_s: float, drafted_s: float, *, rows: int = 4, times: int = 40) -> DraftOverhead:
    overhead = DraftOverhead()
    for _ in range(times):
        overhead.observe(rows, 1.0, plain_s, is_drafted=False)
        overhead.observe(rows, 1.0, drafted_s, is_drafted=True)
    return overhead


def test_the_overhead_is_the_ratio_of_time_per_cost() -> None:
    assert observed(0.010, 0.013)[4] == pytest.approx(1.3, rel=0.02)
    assert observed(0.010, 0.008)[4] == pytest.approx(0.8, rel=0.02)


def test_the_overhead_is_unknown_until_both_kinds_of_step_are_timed() -> None:
    overhead = DraftOverhead()
    for _ in range(50):
        overhead.observe(4, 1.0, 0.02, is_drafted=True)
    for _ in range(MIN_STEPS - 1):
        overhead.observe(4, 1.0, 0.01, is_drafted=False)
    assert overhead[4] == 1.0
    overhead.observe(4, 1.0, 0.01, is_drafted=False)
    assert overhead[4] == pytest.approx(2.0, rel=0.05)


def test_the_overhead_of_few_rows_does_not_hold_for_many() -> None:
    overhead = observed(0.010, 0.020, rows=4)
    assert overhead[7] == overhead[4]
    assert overhead[1] == overhead[8] == 1.0


def test_the_overhead_does_not_depend_on_the_unit_of_cost() -> None:
    one, other = DraftOverhead(), DraftOverhead()
    for _ in range(20):
        for overhead, unit in ((one, 1.0), (other, 1e-3)):
            overhead.observe(2, 1.0 * unit, 0.010, is_drafted=False)
            overhead.observe(2, 2.0 * unit, 0.030, is_drafted=True)
    assert one[2] == pytest.approx(other[2]) == pytest.approx(1.5, rel=0.05)


def test_one_slow_step_changes_the_overhead_little() -> None:
    overhead = observed(0.010, 0.010)
    overhead.observe(4, 1.0, 5.0, is_drafted=True)
    assert overhead[4] < 1.1


def test_the_overhead_is_near_the_mean_of_noisy_steps() -> None:
    chance, overhead = random.Random(3), DraftOverhead()
    for _ in range(400):
        overhead.observe(4, 1.0, 0.010 * chance.uniform(0.8, 1.4), is_drafted=False)
        overhead.observe(4, 1.0, 0.012 * chance.uniform(0.8, 1.4), is_drafted=True)
    assert 1.05 < overhead[4] < 1.35


def test_the_overhead_decays_until_drafts_are_retried() -> None:
    overhead = observed(0.010, 0.020)
    steps = 0
    while overhead[4] > 1.2:
        overhead.observe(4, 1.0, 0.010, is_drafted=False)
        steps += 1
    assert 200 < steps < 2000


def test_a_step_without_a_measured_time_changes_nothing() -> None:
    overhead = observed(0.010, 0.010)
    overhead.observe(4, 1.0, 0.0, is_drafted=True)
    assert overhead[4] == pytest.approx(1.0)


def worth_of(speculation: Speculation) -> int:
    return speculation.best_count(0.6, 4)


@pytest.mark.parametrize(("slower", "is_made"), [(1.0, True), (1.2, True), (2.5, False)])
def test_drafts_are_made_only_if_their_steps_are_fast_enough(slower: float, is_made: bool) -> None:
    config = EngineConfig(worker=WorkerConfig(model=""), max_drafts=8)
    speculation = Speculation(config, 0.0, FLAT)
    assert worth_of(speculation) > 0
    for _ in range(40):
        speculation.observe(4, 4, 0, 0.010)
        speculation.observe(4, 8, 0, 0.010 * slower)
    assert (worth_of(speculation) > 0) == is_made


def test_the_expected_cost_of_drafts_is_no_overhead() -> None:
    """Step times that are proportional to the expected cost give an overhead of 1."""
    config = EngineConfig(worker=WorkerConfig(model=""), max_drafts=8)
    speculation = Speculation(config, 0.25, LINEAR)
    for _ in range(40):
        speculation.observe(4, 4, 0, 0.010)
        speculation.observe(4, 8, 2, 0.025)
    assert speculation.overhead[4] == pytest.approx(1.0)


# ---- n-gram lookup
def searched(tokens: list[int], shortest: int, longest: int, most: int) -> list[int]:
    """Return the drafts of a reference search, which compares every position, the latest first."""
    known = len(tokens)

    def shared(place: int) -> int:
        pairs = zip(reversed(tokens[:place]), reversed(tokens), strict=False)
        return next((i for i, (a, b) in enumerate(islice(pairs, longest)) if a != b), longest)

    places = (p for p in range(known - 1, shortest - 1, -1) if _ends_alike(tokens, p, shortest))
    candidates = list(islice(places, MAX_CANDIDATES))
    if not candidates:
        return []
    place = max(candidates, key=lambda p: (min(shared(p), p), p))
    guess = list(tokens)
    for i in range(most):
        guess.append(guess[place + i])
    return guess[known:]


def _ends_alike(tokens: list[int], place: int, shortest: int) -> bool:
    return tokens[place - shortest : place] == tokens[len(tokens) - shortest :]


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 4), (2, 3), (3, 8)])
@pytest.mark.parametrize("seed", range(5))
def test_the_ngram_index_finds_the_matches_of_a_full_search(
    shortest: int, longest: int, seed: int
) -> None:
    rng = random.Random(seed)
    drafter, tokens = NgramDrafter(shortest, longest), array("i")
    found = 0
    for _ in range(200):
        tokens.extend(rng.randrange(3) for _ in range(rng.choice([1, 1, 1, 4])))
        guess = drafter.propose(tokens, 6)
        assert guess == searched(tokens.tolist(), shortest, longest, 6)
        found += bool(guess)
    assert found > 100


def test_drafts_that_reach_the_end_repeat_from_their_beginning() -> None:
    assert NgramDrafter(2, 4).propose(array("i", [9, 1, 2, 3, 1, 2]), 7) == [3, 1, 2, 3, 1, 2, 3]


def test_an_n_gram_without_an_earlier_match_gives_no_drafts() -> None:
    drafter = NgramDrafter(2, 4)
    assert drafter.propose(array("i", [1]), 4) == []
    assert drafter.propose(array("i", [1, 2, 3, 4]), 4) == []


def test_a_long_prompt_is_indexed_over_several_calls() -> None:
    tokens = array("i", range(50)) + array("i", range(CATCH_UP * 2)) + array("i", range(20, 30))
    drafter = NgramDrafter(3, 5)
    guesses = [drafter.propose(tokens, 2) for _ in range(4)]
    assert guesses == [[], [], [30, 31], [30, 31]]
