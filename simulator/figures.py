"""Collects the times and outcomes of simulated requests, and computes the figures of a result.

Times are counted in buckets that are 1 % wide, so that millions of them need little memory, and
so that the counts of several processes can be added.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log

import msgspec

from protocol.tools.simulation import LoadFigures, Quantiles, SecondFigures, SimulationConfig
from simulator.requests import SimulatedRequest

SMALLEST_S = 1e-6
WIDTH = log(1.01)


class Histogram(msgspec.Struct):
    """Counts of times, in seconds."""

    #: Number of a bucket -> how many times are in it.
    counts: dict[int, int] = {}
    num: int = 0
    total: float = 0.0
    most: float = 0.0

    def add(self, seconds: float, num: int = 1) -> None:
        bucket = int(log(max(seconds, SMALLEST_S) / SMALLEST_S) / WIDTH)
        self.counts[bucket] = self.counts.get(bucket, 0) + num
        self.num += num
        self.total += seconds * num
        if seconds > self.most:
            self.most = seconds

    def merge(self, other: Histogram) -> None:
        for bucket, num in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + num
        self.num += other.num
        self.total += other.total
        self.most = max(self.most, other.most)

    def quantile(self, percent: int) -> float:
        """Return the nearest-rank percentile, to 1 %; 0 if there are no times."""
        rank = max(1, -(-percent * self.num // 100))
        for bucket in sorted(self.counts):
            rank -= self.counts[bucket]
            if rank <= 0:
                return min(SMALLEST_S * exp((bucket + 0.5) * WIDTH), self.most)
        return 0.0

    def num_above(self, seconds: float) -> int:
        """Return how many times are longer than `seconds`, to 1 %."""
        limit = int(log(max(seconds, SMALLEST_S) / SMALLEST_S) / WIDTH)
        return sum(num for bucket, num in self.counts.items() if bucket > limit)

    def quantiles(self) -> Quantiles | None:
        if not self.num:
            return None
        p50, p90, p99 = (self.quantile(percent) for percent in (50, 90, 99))
        return Quantiles(mean=self.total / self.num, p50=p50, p90=p90, p99=p99, max=self.most)


class LoadCounts(msgspec.Struct):
    """Counts of one group of requests, which can be added to those of another process."""

    requests: int = 0
    completed: int = 0
    refused: int = 0
    refused_early: int = 0
    preemptions: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    good: int = 0
    first_at: float = float("inf")
    ended_at: float = 0.0
    ttft: Histogram = msgspec.field(default_factory=Histogram)
    tpot: Histogram = msgspec.field(default_factory=Histogram)
    gap: Histogram = msgspec.field(default_factory=Histogram)
    e2e: Histogram = msgspec.field(default_factory=Histogram)

    def merge(self, other: LoadCounts) -> None:
        for name in self.__struct_fields__:
            own, added = getattr(self, name), getattr(other, name)
            if isinstance(own, Histogram):
                own.merge(added)
            elif name == "first_at":
                self.first_at = min(own, added)
            elif name == "ended_at":
                self.ended_at = max(own, added)
            else:
                setattr(self, name, own + added)

    def figures(self, config: SimulationConfig) -> LoadFigures:
        has_objectives = config.slo_ttft_ms or config.slo_tpot_ms
        return LoadFigures(
            num_requests=self.requests,
            num_completed=self.completed,
            num_refused=self.refused,
            num_refused_early=self.refused_early,
            num_preemptions=self.preemptions,
            duration_s=max(self.ended_at - self.first_at, 0.0),
            input_tokens=self.input_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            ttft=self.ttft.quantiles(),
            tpot=self.tpot.quantiles(),
            gap=self.gap.quantiles(),
            e2e=self.e2e.quantiles(),
            num_good=self.good if has_objectives else None,
        )


class SecondCounts(msgspec.Struct):
    """Counts of one second of the workload."""

    arrived: int = 0
    refused: int = 0
    ttft: Histogram = msgspec.field(default_factory=Histogram)
    waiting: int = 0
    running: int = 0

    def merge(self, other: SecondCounts) -> None:
        self.arrived += other.arrived
        self.refused += other.refused
        self.ttft.merge(other.ttft)
        self.waiting += other.waiting
        self.running += other.running


@dataclass(slots=True)
class OpenAnswer:
    """A request whose first token has been sampled."""

    ttft_s: float
    first_at: float


@dataclass(slots=True)
class LoadRecorder:
    """Receives the events of one group of replicas. Times are of the workload's clock; the time in
    the gateway is added to the times that a client sees."""

    gateway_s: float
    slo_ttft_s: float
    slo_tpot_s: float
    counts: LoadCounts = field(default_factory=LoadCounts)
    seconds: dict[int, SecondCounts] = field(default_factory=dict)
    #: Requests that have ended since the last look, with the time, if another turn may follow.
    ended: list[tuple[SimulatedRequest, float]] = field(default_factory=list)
    _open: dict[int, OpenAnswer] = field(default_factory=dict)

    def second(self, at: float) -> SecondCounts:
        number = int(at)
        counts = self.seconds.get(number)
        if counts is None:
            counts = self.seconds[number] = SecondCounts()
        return counts

    def on_arrival(self, request: SimulatedRequest) -> None:
        counts = self.counts
        counts.requests += 1
        counts.first_at = min(counts.first_at, request.at)
        self.second(request.at).arrived += 1

    def on_refused(self, request: SimulatedRequest, *, is_early: bool = False) -> None:
        self.counts.refused += 1
        self.counts.refused_early += is_early
        self.second(request.at).refused += 1

    def on_first_token(self, request: SimulatedRequest, at: float, num_cached: int) -> None:
        ttft_s = at - request.at + self.gateway_s
        self._open[request.number] = OpenAnswer(ttft_s, at)
        counts = self.counts
        counts.ttft.add(ttft_s)
        counts.input_tokens += request.input_tokens
        counts.cached_tokens += num_cached
        self.second(request.at).ttft.add(ttft_s)

    def on_gaps(self, seconds: float, num: int) -> None:
        """Record that `num` answers got a token `seconds` after the preceding token."""
        self.counts.gap.add(seconds, num)

    def on_preempted(self) -> None:
        self.counts.preemptions += 1

    def on_end(self, request: SimulatedRequest, at: float) -> None:
        answer, counts = self._open.pop(request.number), self.counts
        counts.completed += 1
        counts.output_tokens += request.output_tokens
        counts.ended_at = max(counts.ended_at, at)
        counts.e2e.add(at - request.at + self.gateway_s)
        tpot_s = 0.0
        if request.output_tokens > 1:
            tpot_s = (at - answer.first_at) / (request.output_tokens - 1)
            counts.tpot.add(tpot_s)
        is_in_time = not self.slo_ttft_s or answer.ttft_s <= self.slo_ttft_s
        counts.good += is_in_time and (not self.slo_tpot_s or tpot_s <= self.slo_tpot_s)
        if request.num_turns_left:
            self.ended.append((request, at))


def second_figures(seconds: dict[int, SecondCounts]) -> list[SecondFigures]:
    """Return the figures of each second, in order."""
    return [
        SecondFigures(
            second=number,
            num_arrived=counts.arrived,
            num_refused=counts.refused,
            ttft_p50=counts.ttft.quantile(50),
            ttft_p99=counts.ttft.quantile(99),
            waiting=counts.waiting,
            running=counts.running,
        )
        for number, counts in sorted(seconds.items())
    ]
