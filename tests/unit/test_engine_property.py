"""Ten thousand random operations: whatever clients do, every law holds and every answer is right.

After each operation the engine's invariants are checked by brute force, the echo worker checks that
attention would read exactly each request's own K/V, and at the end each answer is compared with the
oracle.
"""

from __future__ import annotations

import random

import pytest

from protocol.messages import Refused
from protocol.steps import StepPlan
from tests.support.engines import VOCAB, Bench, next_token

OPERATIONS = 10_000
SEEDS = range(4)


class Storm:
    """Random clients around one small, crowded engine."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        block_tokens = self.random.choice([1, 4, 8])
        self.bench = Bench(
            token_budget=self.random.choice([3, 8, 16, 64]),
            block_tokens=block_tokens,
            num_blocks=1 + self.random.choice([64, 96]) // block_tokens,
            max_slots=self.random.choice([2, 4, 7]),
            max_len=60,
            prefix_cache=bool(seed % 2),
            max_waiting=12,
        )
        self.asked: dict[tuple[bytes, int], tuple[list[int], int, int]] = {}
        self.dropped: set[tuple[bytes, int]] = set()
        self.plan: StepPlan | None = None
        self.refused = 0

    def operate(self) -> None:
        choice = self.random.random()
        if self.plan is not None and choice < 0.5:
            self.bench.finish(self.plan)
            self.plan = None
        elif self.plan is None and choice < 0.5:
            self.plan = self.bench.plan()
        elif choice < 0.85:
            self.add()
        elif choice < 0.99:
            self.abort()
        else:
            self.drop()
        self.bench.engine.check()

    def add(self) -> None:
        client = self.random.choice([b"a", b"b", b"c"])
        prompt, seed = self.prompt(), self.random.randrange(3)
        max_tokens = self.random.randrange(20)
        number = self.bench.add(
            prompt,
            client=client,
            namespace=self.random.choice(["", "", "x"]),
            priority=self.random.choice([0, 0, 0, 1]),
            max_tokens=max_tokens,
            seed=seed,
            ignore_eos=self.random.random() < 0.8,
        )
        if isinstance(number, Refused):
            self.refused += 1
        else:
            self.asked[client, number] = (prompt, max_tokens, seed)

    def prompt(self) -> list[int]:
        """A new one, or the beginning of an earlier conversation and more (a fork)."""
        fresh = [self.random.randrange(VOCAB) for _ in range(self.random.randrange(1, 30))]
        if self.asked and self.random.random() < 0.5:
            key = self.random.choice(list(self.asked))
            known = self.asked[key][0] + self.bench.tokens(key[1], key[0])
            return (known[: self.random.randrange(len(known) + 1)] + fresh)[:58]
        return fresh

    def abort(self) -> None:
        if self.asked:
            client, number = self.random.choice(list(self.asked)[-20:])
            self.bench.abort(number, client=client)

    def drop(self) -> None:
        client = self.random.choice([b"a", b"b", b"c"])
        self.bench.engine.drop(client)
        self.dropped |= {key for key in self.asked if key[0] == client}

    def settle(self) -> None:
        if self.plan is not None:
            self.bench.finish(self.plan)
        self.bench.run()


@pytest.mark.parametrize("seed", SEEDS)
def test_ten_thousand_random_operations_keep_every_law(seed: int) -> None:
    storm = Storm(seed)
    for _ in range(OPERATIONS):
        storm.operate()
    storm.settle()
    bench, stats = storm.bench, storm.bench.engine.stats()
    assert bench.engine.is_idle
    assert stats.free_blocks == stats.total_blocks
    assert stats.num_accepted == len(storm.asked) == sum(stats.num_finished.values())
    assert stats.num_refused == storm.refused
    assert stats.num_preemptions > 0, "the storm was too mild to mean anything"
    for (client, number), (prompt, max_tokens, sampling_seed) in storm.asked.items():
        news = bench.news[client, number]
        if (client, number) in storm.dropped and (not news or news[-1].finish is None):
            continue  # dropped while open: nobody was told
        assert [output.finish is not None for output in news].count(True) == 1
        tokens = bench.tokens(number, client)
        _check_tokens(prompt, tokens, sampling_seed)
        assert len(tokens) <= max_tokens
        if news[-1].finish == "length":
            assert len(tokens) == min(max_tokens, bench.limits.max_len - len(prompt))


def _check_tokens(prompt: list[int], tokens: list[int], seed: int) -> None:
    known = list(prompt)
    for token in tokens:
        assert token == next_token(known, seed)
        known.append(token)
