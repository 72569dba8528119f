"""Under thousands of random operations (tests/support/storm.py), every invariant holds and every
answer is right.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from protocol.engine.kv_window import KVGroups
from protocol.engine.messages import Account
from tests.support.engines import Bench
from tests.support.examples import examples
from tests.support.storm import (
    SPECULATING,
    AdapterStorm,
    ImageStorm,
    RequestStorm,
    SmallCacheStorm,
    StateStorm,
    WindowStorm,
)

OPERATIONS = examples(1_500, 10_000)
SEEDS = (0, 3, 4, 5, 100, 103, 104, 107, 200, 202, 205, 207, 300, 302, 305, 307)


@pytest.mark.parametrize("seed", SEEDS)
def test_thousands_of_random_operations_keep_every_law(seed: int) -> None:
    storm = RequestStorm(seed)
    for _ in range(OPERATIONS):
        storm.operate()
    storm.finish_all()
    storm.check()
    stats = storm.bench.engine.stats()
    assert stats.num_preemptions > 0, "the storm was too mild to mean anything"
    assert storm.alone > examples(2, 20), "too few constrained answers came to their end"
    if seed >= SPECULATING:
        assert examples(10, 100) < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("seed", [5, 104, 205, 305])
def test_every_law_holds_while_adapters_are_loaded_and_unloaded(seed: int) -> None:
    storm = AdapterStorm(seed)
    for _ in range(OPERATIONS):
        storm.operate()
    storm.finish_all()
    storm.check()
    assert storm.num_adapted > 50
    assert storm.num_commands > 20


# ---- windows
WINDOW_SEEDS = [(4, 0), (5, 0), (101, 0), (109, 0), (5, 3), (103, 2)]
"""Seed of the storm, and the blocks of a column for the layers with a window; 0: all layers have a
window."""
WINDOW_OPERATIONS = examples(1_200, 5_000)


@pytest.mark.parametrize(("seed", "window_blocks"), WINDOW_SEEDS)
def test_every_answer_is_right_in_a_cache_smaller_than_the_texts_of_a_windowed_model(
    seed: int, window_blocks: int
) -> None:
    storm = WindowStorm(seed, window_blocks)
    for _ in range(WINDOW_OPERATIONS):
        storm.operate()
    storm.finish_all()
    storm.check()
    stats = storm.bench.engine.stats()
    assert stats.num_preemptions > 0, "the storm was too mild to mean anything"
    if storm.bench.limits.prefix_cache:
        assert stats.num_cached_tokens > examples(40, 100)
    if seed >= SPECULATING:
        assert stats.num_accepted_tokens > 0


# ---- recurrent states
STATE_SEEDS = (3, 5, 9, 11, 101, 103, 107, 109, 201, 205, 207, 301, 305)


@pytest.mark.parametrize("seed", STATE_SEEDS)
def test_every_row_continues_the_right_state_of_a_model_with_recurrent_layers(seed: int) -> None:
    storm = StateStorm(seed)
    for _ in range(OPERATIONS):
        storm.operate()
    storm.finish_all()
    storm.check()
    stats = storm.bench.engine.stats()
    assert stats.num_preemptions > 0, "the storm was too mild to mean anything"
    assert stats.num_cached_tokens > examples(15, 50)
    assert storm.num_restored > examples(4, 10)
    assert storm.num_saves > storm.num_restored
    if seed >= SPECULATING:
        assert stats.num_accepted_tokens > 0


@pytest.mark.parametrize(("seed", "options"), [(2, {}), (104, {}), (3, {"num_checkpoints": 0})])
def test_without_checkpoints_no_prefix_of_a_model_with_a_state_is_shared(
    seed: int, options: dict[str, int]
) -> None:
    storm = StateStorm(seed, **options)
    for _ in range(WINDOW_OPERATIONS):
        storm.operate()
    storm.finish_all()
    storm.check()
    assert storm.bench.engine.stats().num_cached_tokens == 0
    assert storm.num_saves == storm.num_restored == 0


@pytest.mark.parametrize(("seed", "window_blocks"), WINDOW_SEEDS)
def test_every_row_continues_the_right_state_beside_layers_with_a_window(
    seed: int, window_blocks: int
) -> None:
    storm = WindowStorm(seed, window_blocks, state_bytes=8, num_checkpoints=8, state_interval=16)
    for _ in range(WINDOW_OPERATIONS):
        storm.operate()
    storm.finish_all()
    storm.check()
    if storm.bench.limits.prefix_cache:
        assert storm.bench.engine.stats().num_cached_tokens > examples(15, 50)


# ---- images
@pytest.mark.parametrize("seed", [1, 3, 4, 5, 105, 205, 303])
def test_every_answer_is_about_the_images_of_its_own_prompt(seed: int) -> None:
    storm = ImageStorm(seed)
    for _ in range(OPERATIONS):
        storm.operate()
    storm.finish_all()
    storm.check()
    images, stats = storm.bench.engine.images, storm.bench.engine.stats()
    assert not images.content.users
    assert storm.num_failed > 2
    assert images.num_hits > 5
    assert images.num_encoded == storm.bench.worker.echo_images.num_encoded > 20
    assert stats.num_preemptions > 0, "the storm was too mild to mean anything"
    if seed % 2:
        assert stats.num_cached_tokens > 10


WHOLE_SIZES: dict[int, dict[str, Any]] = {
    1: {},
    3: {"kv_groups": KVGroups(window=7, window_blocks=2), "block_tokens": 4, "num_blocks": 61},
    5: {"token_budget": 9, "block_tokens": 1, "num_blocks": 65},
    9: {"kv_window": 7, "block_tokens": 4, "num_blocks": 17},
    105: {"block_tokens": 4, "num_blocks": 25},
    307: {"token_budget": 16, "tiers": ["host"], "kv_load_tokens": 5},
}
"""Seed of the storm -> options of its engine."""


@pytest.mark.parametrize("seed", WHOLE_SIZES)
def test_no_step_and_no_cached_prefix_cuts_a_run_that_is_computed_as_a_whole(seed: int) -> None:
    """The echo worker and the engine's invariants check each step."""
    sizes = {"token_budget": 12, "max_slots": 4} | WHOLE_SIZES[seed]
    storm = ImageStorm(seed, sees_whole_runs=True, **sizes)
    for _ in range(WINDOW_OPERATIONS):
        storm.operate()
    storm.finish_all()
    storm.check()
    stats = storm.bench.engine.stats()
    assert storm.bench.engine.images.num_encoded > 20
    assert stats.num_preemptions > 0, "the storm was too mild to mean anything"
    assert stats.num_cached_tokens > examples(5, 10)


@pytest.mark.parametrize("seed", [3, 9, 107])
def test_images_do_not_mix_up_recurrent_states(seed: int) -> None:
    storm = ImageStorm(seed, state_bytes=8, num_checkpoints=8, state_interval=16)
    for _ in range(OPERATIONS):
        storm.operate()
    storm.finish_all()
    storm.check()
    assert storm.bench.engine.stats().num_cached_tokens > examples(5, 10)


# ---- tiers
TIER_SEEDS = {3: ["disk"], 7: ["host", "disk"], 107: ["host"], 205: ["host", "disk"], 207: ["disk"]}
TIER_SEEDS |= {309: ["host", "disk"], 305: ["disk"]}
"""Seed of the storm -> the worker's tiers."""
TIER_OPERATIONS = examples(3_000, 10_000)


@pytest.mark.parametrize("seed", TIER_SEEDS)
def test_every_invariant_holds_and_every_answer_is_right_whatever_the_tiers_do(seed: int) -> None:
    storm = SmallCacheStorm(seed, TIER_SEEDS[seed])
    for _ in range(TIER_OPERATIONS):
        storm.operate()
    storm.finish_all()
    storm.check()
    stats = storm.bench.engine.stats()
    assert stats.num_preemptions > 0, "the storm was too mild to mean anything"
    assert stats.num_fetched_tokens > TIER_OPERATIONS // 6
    assert set(stats.num_fetches_failed) == {"cancelled", "damaged", "lost", "timeout"}
    assert storm.bench.tiers.used, "no use of a tier was reported"


@pytest.mark.parametrize("seed", TIER_SEEDS)
def test_every_row_continues_the_right_state_whatever_the_tiers_do(seed: int) -> None:
    storm = SmallCacheStorm(
        seed, TIER_SEEDS[seed], state_bytes=8, num_checkpoints=7, state_interval=16
    )
    for _ in range(TIER_OPERATIONS):
        storm.operate()
    storm.finish_all()
    storm.check()
    stats = storm.bench.engine.stats()
    assert stats.num_preemptions > 0, "the storm was too mild to mean anything"
    assert stats.num_fetched_tokens > TIER_OPERATIONS // 12
    assert set(stats.num_fetches_failed) == {"cancelled", "damaged", "lost", "timeout"}


# ---- two accounts with more requests than the engine can serve
NAMES = ("alice", "bob", "carol")
STEPS = 600


class FairCrowd:
    """Clients of three accounts. Two of the accounts always have waiting requests."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.bench = Bench(
            token_budget=self.random.choice([8, 16, 48]),
            block_tokens=4,
            num_blocks=1 + self.random.choice([20, 40]),
            max_slots=self.random.choice([2, 5, 8]),
            max_len=60,
            steps_in_flight=1 + seed % 2,
            prefix_cache=bool(seed % 3),
        )
        self.lengths = {name: self.random.choice([1, 8, 20, 40]) for name in NAMES}
        self.answers = {name: self.random.choice([1, 4, 18]) for name in NAMES}
        shares = self.bench.engine.scheduler.fair_share
        self.shares = {name: shares.get(name, lambda name: 1) for name in NAMES}

    def add(self, name: str) -> None:
        length = self.random.randrange(1, self.lengths[name] + 1)
        self.bench.add(
            [self.random.randrange(97) for _ in range(length)],
            account=Account(name=name),
            max_tokens=self.answers[name],
            ignore_eos=True,
        )

    def step(self, *, carol: bool) -> None:
        """Run a step. alice and bob have waiting requests before and after it. If `carol`, carol
        sometimes adds one.
        """
        for name in ("alice", "bob"):
            while self.num_waiting(name) < 10:
                self.add(name)
        if carol and self.random.random() < 0.5:
            self.add("carol")
        self.bench.step()

    def num_waiting(self, name: str) -> int:
        return self.bench.engine.scheduler.waiting.account_load(self.shares[name]).requests

    @property
    def bound(self) -> float:
        """Most tokens by which one account can be ahead of another: its credit, the tokens that
        running requests may still compute, and the token budgets of two steps in flight and one
        more step.
        """
        limits = self.bench.limits
        running = (limits.num_blocks - 1) * limits.block_tokens
        burst = self.bench.engine.scheduler.fair_share.max_credit
        return burst + running + 3 * limits.token_budget


@pytest.mark.parametrize("seed", range(5))
def test_two_waiting_accounts_are_served_alike_over_any_window(seed: int) -> None:
    crowd = FairCrowd(seed)
    gaps = []
    for step in range(STEPS):
        crowd.step(carol=(step // 50) % 2 == 1)
        assert min(map(crowd.num_waiting, ("alice", "bob"))) > 0, "this window says nothing"
        gaps.append(crowd.shares["alice"].served - crowd.shares["bob"].served)
    total = sum(share.served for share in crowd.shares.values())
    assert total > 8 * crowd.bound, "too short to show anything"
    assert max(gaps) - min(gaps) <= crowd.bound
