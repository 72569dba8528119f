"""Two accounts that both want more than there is are served alike, whatever they ask for."""

from __future__ import annotations

import random

import pytest

from protocol.messages import Account
from tests.support.engines import Bench

NAMES = ("alice", "bob", "carol")
STEPS = 600


class FairCrowd:
    """Accounts with requests of their own kinds, of which two always have some that wait."""

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
        shares = self.bench.engine._scheduler.fair_share
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
        """alice and bob have work that waits, before it and after it; carol comes and goes."""
        for name in ("alice", "bob"):
            while self.num_waiting(name) < 10:
                self.add(name)
        if carol and self.random.random() < 0.5:
            self.add("carol")
        self.bench.step()

    def num_waiting(self, name: str) -> int:
        return self.bench.engine._scheduler.waiting.account_load(self.shares[name]).requests

    @property
    def bound(self) -> float:
        """Of how far apart two accounts can come: a head start, what those that run may still
        compute, what is on its way, and what one of them may have taken last."""
        limits = self.bench.limits
        running = (limits.num_blocks - 1) * limits.block_tokens
        burst = self.bench.engine._scheduler.fair_share.max_credit
        return burst + running + 3 * limits.token_budget


@pytest.mark.parametrize("seed", range(5))
def test_over_any_window_in_which_both_wait_two_accounts_are_served_alike(seed: int) -> None:
    crowd = FairCrowd(seed)
    gaps = []
    for step in range(STEPS):
        crowd.step(carol=(step // 50) % 2 == 1)
        assert min(map(crowd.num_waiting, ("alice", "bob"))) > 0, "this window says nothing"
        gaps.append(crowd.shares["alice"].served - crowd.shares["bob"].served)
    total = sum(share.served for share in crowd.shares.values())
    assert total > 8 * crowd.bound, "too short to show anything"
    assert max(gaps) - min(gaps) <= crowd.bound
