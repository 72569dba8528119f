"""The simulated cluster, or the part of it that one process simulates.

Time passes in windows, each as long as the time between two reports of load. In a window, the
gateways route what arrives, by what was reported at its start. Then the replicas simulate the
window, each for itself, and report. So what happens in a window in one part of the cluster cannot
affect another part within it, and several processes can simulate one cluster with equal results:
process i of n has the gateways and the replicas whose number is i modulo n.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import msgspec

from protocol.engine.stats import EngineLoad
from protocol.tools.simulation import SimulationConfig, StateFigures
from protocol.wire.errors import ErrorInfo, Overloaded
from simulator.figures import LoadCounts, LoadRecorder, SecondCounts
from simulator.gateway import NO_LOAD, ReportedLoads, RoutingGateway
from simulator.light import LightReplica
from simulator.machine import SimulatedReplicaType
from simulator.replica import EngineReplica, SimulatedReplica
from simulator.requests import SimulatedRequest
from simulator.workload import WorkloadStreams


class SentRequest(msgspec.Struct, array_like=True):
    """A request on its way to a replica of another process."""

    replica: int
    request: SimulatedRequest


class ReportedLoad(msgspec.Struct, array_like=True):
    """The load of a replica at the end of a window."""

    replica: int
    load: EngineLoad


class RefusedRequest(msgspec.Struct, array_like=True):
    """A request that goes back to its gateway, because a replica has refused it."""

    request: SimulatedRequest
    replica: int
    refusal: ErrorInfo


class WindowReport(msgspec.Struct, array_like=True):
    """The message of one process to the others at the end of a window."""

    loads: list[ReportedLoad]
    refused: list[RefusedRequest]
    #: Whether it has nothing more to do, unless others send it something.
    is_done: bool


class PartTotals(msgspec.Struct):
    """The counts of one process, which can be added to those of another."""

    all: LoadCounts
    exact: LoadCounts
    seconds: dict[int, SecondCounts]
    num_by_reason: dict[str, int]
    expected_tokens: int = 0
    router_cpu_s: float = 0.0
    num_entries: int = 0
    busy_s: float = 0.0
    #: Sum over all reports of the busiest replica's share, and the number of these reports.
    imbalance: float = 0.0
    num_imbalances: int = 0
    states: StateFigures = msgspec.field(default_factory=StateFigures)

    def merge(self, other: PartTotals) -> None:
        self.all.merge(other.all)
        self.exact.merge(other.exact)
        for number, counts in other.seconds.items():
            self.seconds.setdefault(number, SecondCounts()).merge(counts)
        reasons = Counter(self.num_by_reason)
        reasons.update(other.num_by_reason)
        self.num_by_reason = dict(reasons)
        self.expected_tokens += other.expected_tokens
        self.router_cpu_s += other.router_cpu_s
        self.num_entries += other.num_entries
        self.busy_s += other.busy_s
        self.states.merge(other.states)


class PartPeers(Protocol):
    """The other processes that simulate parts of the cluster."""

    def exchange_requests(self, outgoing: list[list[SentRequest]]) -> list[SentRequest]:
        """Send `outgoing[i]` to process i, and return what the others have sent here."""
        ...

    def exchange_reports(self, own: WindowReport) -> list[WindowReport]:
        """Send a report to all other processes, and return theirs."""
        ...


class NoPartPeers:
    """The `PartPeers` of a process that simulates the whole cluster, so there are no peers."""

    def exchange_requests(self, outgoing: list[list[SentRequest]]) -> list[SentRequest]:
        return []

    def exchange_reports(self, own: WindowReport) -> list[WindowReport]:
        return []


class ClusterPart:
    """The gateways and replicas of one process.

    kind        of all replicas
    num_exact   the replicas below this number run the real engine
    part        number of this process
    """

    def __init__(
        self,
        config: SimulationConfig,
        kind: SimulatedReplicaType,
        streams: WorkloadStreams,
        *,
        num_exact: int,
        part: int = 0,
        peers: PartPeers | None = None,
    ) -> None:
        self._config = config
        self._streams = streams
        self._part, self._num_parts = part, config.processes
        self._peers = peers or NoPartPeers()
        self._reported = ReportedLoads([NO_LOAD] * config.replicas)
        self._gateways = {
            number: RoutingGateway(
                config,
                number,
                streams.arrivals(number),
                self._reported,
                block_tokens=kind.limits.block_tokens,
                cache_tokens=kind.limits.num_blocks * kind.limits.block_tokens,
            )
            for number in range(part, config.gateways, self._num_parts)
        }
        self._exact, self._light, self._early = (self._recorder() for _ in range(3))
        self._num_exact = num_exact
        self._replicas = {
            number: self._replica(kind, number)
            for number in range(part, config.replicas, self._num_parts)
        }
        #: Replicas with work. The others are not looked at.
        self._active: dict[int, SimulatedReplica] = {}
        self._refused: list[RefusedRequest] = []
        self._imbalance = 0.0
        self._num_imbalances = 0

    def run(self) -> PartTotals:
        """Simulate the whole workload."""
        window_s, number = self._config.report_ms / 1e3, 0
        while True:
            end_s = (number + 1) * window_s
            self._route(end_s)
            for replica in self._active.values():
                replica.advance(end_s)
            is_done = self._report(end_s)
            if is_done:
                return self._totals()
            if int(end_s) > int(number * window_s):
                self._on_second(int(number * window_s))
            number += 1
            if not self._active and self._num_parts == 1:  # skip windows in which nothing happens
                number = max(number, int(self._next_at / window_s) - 1)

    def _route(self, until: float) -> None:
        """Route the requests that arrive before `until`, and send them to their replicas."""
        outgoing: list[list[SentRequest]] = [[] for _ in range(self._num_parts)]
        for gateway in self._gateways.values():
            for routed in gateway.route(until):
                if routed.replica is None:
                    if not routed.request.tried:
                        self._early.on_arrival(routed.request)
                    self._early.on_refused(routed.request, is_early=not routed.request.tried)
                elif (part := routed.replica % self._num_parts) == self._part:
                    self._push(routed.replica, routed.request)
                else:
                    outgoing[part].append(SentRequest(routed.replica, routed.request))
        for sent in self._peers.exchange_requests(outgoing):
            self._push(sent.replica, sent.request)

    def _push(self, number: int, request: SimulatedRequest) -> None:
        replica = self._replicas[number]
        if not request.tried:
            self._recorder_of(number).on_arrival(request)
        replica.push(request)
        self._active[number] = replica

    def _report(self, now: float) -> bool:
        """Exchange, with the other processes, the loads of all replicas and the requests that they
        refused. Return whether all processes have nothing more to do."""
        loads = [ReportedLoad(number, each.load) for number, each in self._active.items()]
        self._active = {n: replica for n, replica in self._active.items() if not replica.is_idle}
        self._add_turns(now)
        is_done = not self._active and not self._refused and self._next_at == float("inf")
        own = WindowReport(loads, self._refused, is_done)
        self._refused = []
        reports = [own, *self._peers.exchange_reports(own)]
        for report in reports:
            for entry in report.loads:
                self._reported.loads[entry.replica] = entry.load
            for refused in report.refused:
                if (gateway := self._gateways.get(refused.request.gateway)) is not None:
                    gateway.on_refused(refused.request, refused.replica, refused.refusal, now)
        self._reported.number += 1
        return all(report.is_done for report in reports)

    def _add_turns(self, now: float) -> None:
        """Add the turns of conversations that follow the answers that have ended."""
        for recorder in (self._exact, self._light):
            for request, ended_at in recorder.ended:
                turn = self._streams.next_turn(request, ended_at)
                if turn is not None:
                    turn.at = max(turn.at, now)
                    self._gateways[turn.gateway].add_turn(turn)
            recorder.ended.clear()

    @property
    def _next_at(self) -> float:
        """When the next request arrives at one of the gateways; infinite if none does."""
        return min([gateway.next_at for gateway in self._gateways.values()], default=float("inf"))

    def _on_second(self, second: int) -> None:
        """Count the requests in the replicas of this part, at the end of a second."""
        loads = [self._reported.loads[number] for number in self._replicas]
        counts = self._light.second(second)
        counts.waiting += sum([load.waiting for load in loads])
        counts.running += sum([load.running for load in loads])
        num_open = [load.running + load.waiting for load in self._reported.loads]
        # Among few requests, those of one replica would say nothing.
        if (total := sum(num_open)) >= len(num_open):
            self._imbalance += max(num_open) * len(num_open) / total
            self._num_imbalances += 1

    def _recorder(self) -> LoadRecorder:
        config = self._config
        return LoadRecorder(
            config.gateway_ms / 1e3, config.slo_ttft_ms / 1e3, config.slo_tpot_ms / 1e3
        )

    def _recorder_of(self, replica: int) -> LoadRecorder:
        return self._exact if replica < self._num_exact else self._light

    def _replica(self, kind: SimulatedReplicaType, number: int) -> SimulatedReplica:
        recorder = self._recorder_of(number)

        def on_refused(request: SimulatedRequest, refusal: ErrorInfo) -> None:
            if refusal.code == Overloaded.code:
                self._refused.append(RefusedRequest(request, number, refusal))
            else:
                recorder.on_refused(request)

        make = EngineReplica if number < self._num_exact else LightReplica
        return make(kind.engine, kind.limits, kind.steps_of(number), recorder, on_refused)

    def _totals(self) -> PartTotals:
        gateways = self._gateways.values()
        totals = PartTotals(
            all=LoadCounts(),
            exact=LoadCounts(),
            seconds={},
            num_by_reason=dict(sum((g.num_by_reason for g in gateways), Counter())),
            expected_tokens=sum(gateway.expected_tokens for gateway in gateways),
            router_cpu_s=sum(gateway.cpu_s for gateway in gateways),
            num_entries=sum(len(gateway.router) for gateway in gateways),
            busy_s=sum(replica.busy_s for replica in self._replicas.values()),
            imbalance=self._imbalance,
            num_imbalances=self._num_imbalances,
        )
        totals.exact.merge(self._exact.counts)
        for replica in self._replicas.values():
            totals.states.merge(replica.state_figures())
        for recorder in (self._exact, self._light, self._early):
            totals.all.merge(recorder.counts)
            for number, counts in recorder.seconds.items():
                totals.seconds.setdefault(number, SecondCounts()).merge(counts)
        return totals
