"""An engine on a simulated clock, to measure clients' waiting times without really waiting.

A step takes `STEP_S`, and `TOKEN_S` for each of its tokens. If `costs` are given, they are the
times of steps instead, and the engine receives them as the worker's measured costs. As in the
engine's own loop, several steps are in flight, and requests that arrive during a step are read at
its end.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from engine_core.speculation.step_costs import StepCosts
from gateway.engine.refusal_cache import RefusalCache
from protocol.engine.messages import Account, Output, Refused
from protocol.wire.errors import error_from
from tests.support.engines import CLIENT, Bench

STEP_S, TOKEN_S = 0.004, 0.0005


@dataclass
class PacedRequest:
    """One request, as its client sees it. Times are on the simulated clock; None: not yet."""

    at: float
    prompt_tokens: int
    refused: Refused | None = None
    first_at: float | None = None
    ended_at: float | None = None
    outputs: list[Output] = field(default_factory=list)

    @property
    def wait_s(self) -> float:
        """Return the time to the first token."""
        assert self.first_at is not None
        return self.first_at - self.at

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of prompt and answer; 0 unless the answer finished by its
        length."""
        if self.ended_at is None or self.outputs[-1].finish != "length":
            return 0
        return self.prompt_tokens + sum(len(output.tokens) for output in self.outputs)


class Paced:
    """A Bench on a simulated clock.

    costs           (tokens, seconds) of steps, as measured
    refusal_cache   the cache of a gateway in front of the engine; None: there is no gateway
    options         options of Bench
    now             time of the clock, from 0
    num_early       requests that the gateway refused from its cache
    asked           all requests
    """

    def __init__(
        self,
        costs: Sequence[tuple[int, float]] = (),
        refusal_cache: RefusalCache | None = None,
        **options: Any,
    ) -> None:
        self.now = 0.0
        self.num_early = 0
        self._refusal_cache = refusal_cache
        self.bench = Bench(sample=_endless, checks=False, step_costs=costs, **options)
        self._costs = StepCosts(costs or [(0, STEP_S), (1, STEP_S + TOKEN_S)])
        self.asked: list[PacedRequest] = []
        self._open: dict[int, PacedRequest] = {}
        self._coming: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()
        self._due = 0.0  # time of the call that runs now

    def at(self, when: float, do: Callable[[], object]) -> None:
        """Schedule a call of `do` at the simulated time `when`."""
        heapq.heappush(self._coming, (when, next(self._numbers), do))

    def ask(
        self, prompt_tokens: int, answer: int, account: Account | None = None, **terms: Any
    ) -> PacedRequest:
        """Send a request now. Inside a call that `at` has scheduled, now is the time of that call.
        No two prompts start with the same tokens."""
        number = next(self._numbers)
        prompt = [1 + number % 90, 1 + number // 90 % 90, 1 + number // 8100] + [7] * prompt_tokens
        asked = PacedRequest(self._due, prompt_tokens)
        self.asked.append(asked)
        if self._refusal_cache is not None and (
            early := self._refusal_cache.get(account, self._due)
        ):
            self.num_early += 1
            asked.refused = Refused(request=-1, error=early.info())
            return asked
        reply = self.bench.try_add(
            prompt[:prompt_tokens], account=account, max_tokens=answer, ignore_eos=True, **terms
        )
        if isinstance(reply, Refused):
            asked.refused = reply
            if self._refusal_cache is not None:
                self._refusal_cache.add(account, error_from(reply.error), self._due)
        else:
            self._open[reply] = asked
        return asked

    def run(self, until: float) -> None:
        """Run the clock until the given time. Open requests stay open."""
        while self.now < until:
            self._run_due_calls()
            while self.bench.plan() is not None:
                pass
            if self.bench.in_flight:
                tokens = sum(self.bench.in_flight[0].row_tokens.tolist())
                elapsed_s = self._costs[tokens]
                self._tick(self.now + elapsed_s)
                self.bench.finish(elapsed_s)
            else:
                self._tick(min(self._coming[0][0], until) if self._coming else until)
            self._note_outputs()

    def _run_due_calls(self) -> None:
        while self._coming and self._coming[0][0] <= self.now:
            self._due, _, do = heapq.heappop(self._coming)
            do()

    def _tick(self, now: float) -> None:
        self.now = now
        self.bench.tick(now)

    def _note_outputs(self) -> None:
        for number, asked in list(self._open.items()):
            asked.outputs = self.bench.outputs[CLIENT, number]
            if asked.first_at is None and any(output.tokens for output in asked.outputs):
                asked.first_at = self.now
            if asked.outputs and asked.outputs[-1].finish is not None:
                asked.ended_at = self.now
                del self._open[number]


def _endless(tokens: list[int], seed: int = 0, possible: list[int] | None = None) -> int:
    return 1 + (tokens[-1] + 1) % 90
