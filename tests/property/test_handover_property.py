"""Two small, crowded engines hand K/V over to each other, under random operations.

Each engine computes prompts for the other and serves its own clients. Fetches are carried out, fail
or are aborted in any order. Leases are kept, released, taken or run out. The expected answers do
not depend on any of this: every answer must equal that of a single engine, and in the end every
block is free.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine_core.requests.request import RequestPhase
from protocol.engine.messages import Refused
from protocol.engine.stats import EngineStats
from tests.support.examples import examples
from tests.support.handover import EchoMover, KVNetwork
from tests.support.storm import RequestStorm

OPERATIONS = examples(6_000, 12_000)
SEEDS = examples((200, 104, 300), (200, 104, 300, 3, 7))
"""Seeds as in tests.support.storm: the first uses a draft model, the second n-grams."""
STATE_SEEDS = examples((203, 104), (203, 104, 3, 7))
FAULTS = ("expired", "unreachable", "damaged", "timeout")


@dataclass
class Table:
    """The network, the offers and the time, which both engines share.

    offers   (handle, the prompt without its last token, namespace) of each handle that a client has
             received
    """

    air: KVNetwork = field(default_factory=KVNetwork)
    offers: list[tuple[str, list[int], str]] = field(default_factory=list)
    now: float = 0.0


class Partner(RequestStorm):
    """One of the two engines, with its clients."""

    def __init__(
        self, seed: int, name: str, table: Table, kv_on_failure: str, **config: Any
    ) -> None:
        place = table.air.member(name)
        block_tokens = 4 if seed % 2 else 8
        super().__init__(
            seed,
            place=place,
            kv_on_failure=kv_on_failure,
            token_budget=24,
            max_slots=6,
            block_tokens=block_tokens,
            num_blocks=1 + 160 // block_tokens,
            **config,
        )
        self.random = random.Random(f"{seed} {name}")  # equal engines, different operations
        self.table = table
        self.producing: dict[tuple[bytes, int], tuple[list[int], str]] = {}
        self.failing = kv_on_failure == "error"
        self.has_state = self.bench.limits.state_bytes > 0
        self.num_failed = 0

    @property
    def mover(self) -> EchoMover:
        assert self.bench.mover is not None
        return self.bench.mover

    def operate(self) -> None:
        choice = self.random.random()
        is_busy = self.bench.engine.stats().waiting > 5
        if choice < 0.55 or (is_busy and choice < 0.75):
            self.compute()
        elif choice < 0.6:
            super().operate()
        elif choice < 0.65:
            self.produce()
        elif choice < 0.75:
            self.consume()
        elif choice < 0.77:
            self.abort_fetching()
        elif choice < 0.93:
            self.move()
        elif choice < 0.97:
            self.bench.on_kv_report(self.mover.report_taken())
        elif choice < 0.98:
            self.keep_or_release()
        else:
            self.table.now += self.random.choice([0.1, 1.0, 20.0])
            self.bench.tick(self.table.now)
        self.offer()
        self.bench.check()

    def compute(self) -> None:
        if self.bench.jobs and self.random.random() < 0.2:
            self.compile()
        elif self.bench.plan() is None and self.bench.in_flight:
            self.bench.finish()

    def produce(self) -> None:
        prompt, namespace = self.prompt(), self.random.choice(["", "x"])
        client = self.random.choice([b"a", b"b"])
        readers = self.random.choice([1, 1, 2])
        number = self.bench.try_add(prompt, client, namespace, kv_readers=readers, temperature=0.5)
        if isinstance(number, Refused):
            self.refused += 1
            return
        self.asked[client, number] = (prompt, 0, 0)
        self.shown[client, number] = []
        self.producing[client, number] = (prompt[:-1], namespace)

    def offer(self) -> None:
        """Offer the handles that clients have received to the clients of both engines."""
        for key in list(self.producing):
            if not (news := self.bench.outputs[key]):
                continue
            tokens, namespace = self.producing.pop(key)
            if news[-1].finish == "length":
                size = self.bench.limits.block_tokens if self.has_state else 1
                assert bool(news[-1].kv_handle) == (len(tokens) >= size)
            if news[-1].kv_handle:
                self.table.offers.append((news[-1].kv_handle, tokens, namespace))

    def consume(self) -> None:
        """Send a request with a handle that was offered before: usually the latest, sometimes one
        of the last twelve. Its lease may have ended."""
        if not self.table.offers:
            return
        handle, tokens, namespace = self.random.choice(
            self.table.offers[-self.random.choice([1, 1, 12]) :]
        )
        prompt = (tokens + self.prompt())[: self.random.choice([len(tokens) + 1, 58])]
        client, seed = self.random.choice([b"a", b"b", b"c"]), self.random.randrange(3)
        max_tokens = self.random.randrange(20)
        grammar = self.grammar() if self.random.random() < 0.2 else None
        number = self.bench.try_add(
            prompt,
            client,
            namespace,
            grammar=None if grammar is None else grammar[0],
            kv_handle=handle,
            max_tokens=max_tokens,
            seed=seed,
            prompt_logprobs=self.random.choice([None] * 9 + [1]),
        )
        if isinstance(number, Refused):
            assert number.error.param != "kv_transfer_params"
            self.refused += 1
            return
        self.asked[client, number] = (prompt, max_tokens, seed)
        self.shown[client, number] = []
        if grammar is not None:
            self.constrained[client, number] = grammar

    def move(self) -> None:
        """Complete one of the open fetches, with or without a fault."""
        if self.mover.jobs:
            job = self.random.choice(list(self.mover.jobs))
            fault = self.random.choice(FAULTS) if self.random.random() < 0.2 else ""
            self.bench.on_kv_report(self.mover.carry_out(job, fault))

    def abort_fetching(self) -> None:
        """Abort a request whose K/V is being fetched."""
        unbound = self.bench.engine.scheduler.unbound
        fetching = [request for request in unbound if request.phase is not RequestPhase.FINISHED]
        if fetching:
            request = self.random.choice(fetching)
            self.bench.abort(request.number, client=request.client)
            self.bench.send_kv_commands()

    def keep_or_release(self) -> None:
        """Keep or release handles of either engine. The engine ignores those of the other one."""
        handles = [offer[0] for offer in self.table.offers[-6:]]
        if handles:
            command = self.random.choice([self.bench.engine.keep_kv, self.bench.engine.release_kv])
            command([*self.random.sample(handles, k=min(2, len(handles))), "no handle"])
            self.bench.send_kv_commands()

    def settle(self) -> None:
        """Complete everything that is open, without new requests."""
        while self.bench.jobs:
            self.compile()
        while not self.bench.engine.is_idle:
            while self.bench.step() is not None or self.mover.jobs:
                self.move()
            self.table.now += 1000
            self.bench.tick(self.table.now)

    def _check_answer(self, client: bytes, number: int) -> None:
        news = self.bench.outputs[client, number]
        if news and news[-1].finish == "error":
            assert self.failing
            assert "could not be fetched" in news[-1].error.message
            assert self.bench.tokens(number, client) == []
            self.num_failed += 1
        else:
            super()._check_answer(client, number)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_engines_that_hand_over_to_each_other_keep_every_law(seed: int) -> None:
    stats = check_a_storm(seed)
    assert min(each.num_fetched_tokens for each in stats) > 500


@pytest.mark.parametrize("seed", STATE_SEEDS)
def test_two_engines_that_hand_over_recurrent_states_keep_every_law(seed: int) -> None:
    """The echo workers check the state at the start of each row. There are few checkpoints, so some
    prompts wait for one, and some are not fetched."""
    stats = check_a_storm(
        seed, state_bytes=8, num_checkpoints=9, state_interval=16, prefix_cache=True
    )
    assert min(each.num_fetched_tokens for each in stats) > 300


def check_a_storm(seed: int, **config: Any) -> list[EngineStats]:
    """Run a storm of two engines, check everything, and return their statistics."""
    table = Table()
    pair = [
        Partner(seed, "p", table, "recompute", **config),
        Partner(seed, "d", table, "error", **config),
    ]
    dice = random.Random(seed)
    for _ in range(OPERATIONS):
        dice.choice(pair).operate()
    for partner in pair:
        partner.settle()
    for partner in pair:
        partner.check()
    told = [partner.bench.engine.stats() for partner in pair]
    assert all({*FAULTS, "cancelled"} == set(stats.num_fetches_failed) for stats in told)
    ends = {"taken", "released", "expired", "yielded"}
    assert set().union(*(stats.num_leases_ended for stats in told)) == ends
    assert sum(stats.num_preemptions for stats in told) > 0
    assert pair[1].num_failed > 20
    return told
