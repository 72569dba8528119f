"""A simulated gateway process: the real router, with what this process can know.

A gateway knows which prefixes it has sent where, and the loads that replicas have reported. It does
not know what other gateways have sent since the last report.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from gateway.engine.refusal_cache import RefusalCache
from gateway.fleet.routing import PrefixRouter, ReplicaLoad, prefix_hashes
from protocol.engine.stats import EngineLoad
from protocol.tools.simulation import SimulationConfig
from protocol.wire.arrays import Int32
from protocol.wire.errors import ErrorInfo, error_from
from simulator.requests import SimulatedRequest, prompt_of

NO_LOAD = EngineLoad(0, 0, 0)


@dataclass(slots=True)
class ReportedLoads:
    """The loads that all replicas have reported last."""

    loads: list[EngineLoad]
    #: Number of the report.
    number: int = 0


@dataclass(slots=True)
class LateLoad(ReplicaLoad):
    """A replica's load, as a gateway sees it. A report is applied when it is first needed,
    because most replicas are not looked at between two reports."""

    replica: int = 0
    reported: ReportedLoads = field(default_factory=lambda: ReportedLoads([]))
    number: int = 0

    @property
    def tokens(self) -> int:
        self._apply()
        return ReplicaLoad.tokens.fget(self)  # type: ignore[attr-defined,no-any-return]

    def on_sent(self, num_tokens: int) -> None:
        self._apply()
        ReplicaLoad.on_sent(self, num_tokens)

    def _apply(self) -> None:
        if self.number != self.reported.number:
            self.number = self.reported.number
            self.num_sent = self.sent_tokens = 0  # a report includes all that was sent before
            self.on_report(self.reported.loads[self.replica])


@dataclass(slots=True)
class RoutedArrival:
    """A request, and the replica that a gateway sends it to; None: the gateway refuses it."""

    request: SimulatedRequest
    replica: int | None


class RoutingGateway:
    """One gateway process.

    number      of this gateway
    arrivals    the requests that it gets, by time
    reported    the loads of all replicas

    block_tokens, cache_tokens   tokens of a block, and of a replica's whole cache
    """

    def __init__(
        self,
        config: SimulationConfig,
        number: int,
        arrivals: Iterator[SimulatedRequest],
        reported: ReportedLoads,
        *,
        block_tokens: int,
        cache_tokens: int,
    ) -> None:
        self.router = PrefixRouter(
            max_entries=config.routing_entries, seed=config.seed * 4096 + number
        )
        for replica in range(config.replicas):
            self.router.add(f"replica {replica}", cache_tokens)
            self.router.loads[replica] = LateLoad(replica=replica, reported=reported)
            self.router.set_usable(replica, is_usable=True)
        self.cpu_s = 0.0
        self.num_by_reason: Counter[str] = Counter()
        self.expected_tokens = 0
        self._mode = config.routing
        self._num_replicas = config.replicas
        self._block_tokens = block_tokens
        self._random = random.Random(f"{config.seed}/routing {number}")
        self._arrivals = arrivals
        self._next = next(arrivals, None)
        #: (time, number, request) of later turns, and of requests that a replica has refused.
        self._turns: list[tuple[float, int, SimulatedRequest]] = []
        #: Refusals of replicas that are still valid.
        self._refusals: dict[int, RefusalCache] = {}

    @property
    def next_at(self) -> float:
        """When the next request arrives; infinite if there is none."""
        at = self._next.at if self._next is not None else float("inf")
        return min(at, self._turns[0][0]) if self._turns else at

    def add_turn(self, request: SimulatedRequest) -> None:
        heappush(self._turns, (request.at, request.number, request))

    def on_refused(
        self, request: SimulatedRequest, replica: int, refusal: ErrorInfo, now: float
    ) -> None:
        """Remember a refusal, if it says how long it is valid, and try the request on another
        replica."""
        self._refusals.setdefault(replica, RefusalCache()).add(None, error_from(refusal), now)
        request.tried.append(replica)
        request.retried_at = now
        heappush(self._turns, (now, request.number, request))

    def route(self, until: float) -> list[RoutedArrival]:
        """Choose a replica for each request that arrives before `until`."""
        arrived = self._arrived(until)
        if not arrived:
            return []
        prompts = [(request, prompt_of(request.path)) for request in arrived]
        refusing = self._refusing(arrived[0].at)
        started = time.process_time()
        routed = [
            RoutedArrival(request, self._choose(request, prompt, refusing))
            for request, prompt in prompts
        ]
        self.cpu_s += time.process_time() - started
        return routed

    def _arrived(self, until: float) -> list[SimulatedRequest]:
        arrived = []
        while self._next is not None and self._next.at < until:
            arrived.append(self._next)
            self._next = next(self._arrivals, None)
        while self._turns and self._turns[0][0] < until:
            arrived.append(heappop(self._turns)[2])
        return arrived

    def _refusing(self, now: float) -> frozenset[int]:
        """Return the replicas whose last refusal is still valid, and forget the others."""
        if not self._refusals:
            return frozenset()
        self._refusals = {
            replica: cache
            for replica, cache in self._refusals.items()
            if cache.get(None, now) is not None
        }
        return frozenset(self._refusals)

    def _choose(
        self, request: SimulatedRequest, prompt: Int32, refusing: frozenset[int]
    ) -> int | None:
        router = self.router
        if request.tried:
            refusing = refusing.union(request.tried)
        if self._mode == "random":
            if len(refusing) >= self._num_replicas:
                return None
            while (replica := int(self._random.random() * self._num_replicas)) in refusing:
                pass
            self.num_by_reason["random"] += 1
            return replica
        hashes = []
        if self._mode == "prefix":
            hashes = prefix_hashes(prompt, "", self._block_tokens)
        decision = router.choose(hashes, session=request.session, exclude=refusing)
        if decision is None:
            return None
        router.on_sent(
            hashes,
            decision.replica,
            request.input_tokens - decision.num_cached,
            prompt_tokens=request.input_tokens,
            session=request.session,
        )
        self.num_by_reason[decision.reason] += 1
        self.expected_tokens += decision.num_cached
        return decision.replica
