"""Simulates a cluster of a given size, or searches the smallest one that meets a target."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from protocol.tools.simulation import RoutingFigures, SimulationConfig, SimulationResult
from simulator.cluster import ClusterPart, PartPeers, PartTotals
from simulator.figures import second_figures
from simulator.machine import SimulatedReplicaType
from simulator.processes import run_parts
from simulator.trace import TraceLine, read_trace
from simulator.workload import WorkloadStreams

LATE_SHARE = 0.01
"""Share of the requests that may miss a target for the 99th percentile."""


class Simulation:
    """Simulations of one workload on clusters of different sizes. The constructor raises OSError
    and ValueError if the trace cannot be used."""

    def __init__(self, config: SimulationConfig, kind: SimulatedReplicaType) -> None:
        self._config = config
        self._kind = kind
        self._trace: list[TraceLine] = read_trace(Path(config.trace)) if config.trace else []

    def results(self) -> Iterator[SimulationResult]:
        """Yield a result for each size that is simulated. The last one is the answer."""
        config = self._config
        if not config.target_ttft_p99:
            yield self.simulate(config.replicas, config.exact)
            return
        yield from self._search()

    def _search(self) -> Iterator[SimulationResult]:
        """Search the smallest size that meets the target: double it until it does, then halve the
        interval. Then check the answer with the real engine, and add replicas until it agrees."""
        low, high = 0, max(self._config.replicas, self._config.processes)
        while True:
            result = self.simulate(high, 0)
            yield result
            if result.meets_target or high >= self._config.max_replicas:
                break
            low, high = high, min(2 * high, self._config.max_replicas)
        if not result.meets_target:
            return
        while high - low > 1:
            middle = (low + high) // 2
            result = self.simulate(middle, 0)
            yield result
            low, high = (low, middle) if result.meets_target else (middle, high)
        for replicas in range(high, self._config.max_replicas + 1):
            result = self.simulate(replicas, self._config.exact)
            yield result
            if result.meets_target:
                return

    def simulate(self, replicas: int, num_exact: int) -> SimulationResult:
        """Simulate the workload on a cluster of `replicas`, of which `num_exact` run the real
        engine. If the model has recurrent layers, all of them do."""
        if self._kind.limits.state_bytes:
            num_exact = replicas  # the light model has no checkpoints of recurrent states
        started, num_exact = time.perf_counter(), min(num_exact, replicas)
        processes = min(self._config.processes, replicas)
        config = replace(self._config, replicas=replicas, processes=processes)

        def run(part: int, peers: PartPeers | None) -> PartTotals:
            streams = WorkloadStreams(config, self._trace)
            cluster = ClusterPart(
                config, self._kind, streams, num_exact=num_exact, part=part, peers=peers
            )
            gc.disable()  # there are no cycles to find among millions of objects
            try:
                return cluster.run()
            finally:
                gc.enable()

        totals = run(0, None) if processes == 1 else run_parts(processes, run)
        wall_s = time.perf_counter() - started
        result = _result(config, totals, num_exact, wall_s)
        return replace(result, states=totals.states if self._kind.limits.state_bytes else None)


def _result(
    config: SimulationConfig, totals: PartTotals, num_exact: int, wall_s: float
) -> SimulationResult:
    counts = totals.all
    figures = counts.figures(config)
    meets_target = None
    if config.target_ttft_p99:
        num_late = counts.ttft.num_above(config.target_ttft_p99) + counts.refused
        meets_target = num_late <= LATE_SHARE * counts.requests
    duration_s = max(figures.duration_s, 1e-9)
    return SimulationResult(
        replicas=config.replicas,
        gpus=config.replicas * config.tensor_parallel,
        exact=num_exact,
        figures=figures,
        exact_figures=totals.exact.figures(config) if totals.exact.requests else None,
        routing=RoutingFigures(
            num_by_reason=totals.num_by_reason,
            expected_tokens=totals.expected_tokens,
            cpu_s=totals.router_cpu_s,
            num_entries=totals.num_entries,
            imbalance=totals.imbalance / max(totals.num_imbalances, 1),
        ),
        busy=min(totals.busy_s / config.replicas / duration_s, 1.0),
        seconds=second_figures(totals.seconds),
        wall_s=wall_s,
        meets_target=meets_target,
    )
