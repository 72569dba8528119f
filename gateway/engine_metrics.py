"""What engines tell of themselves with each heartbeat, as Prometheus series.

Any process of a gateway tells the same; where there are several engines, their series have the
labels `role` and `address`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.engine_client import Line
from protocol.stats import EngineStats


class EngineCollector(Collector):
    """lines: to the engines; none where the server has none"""

    def __init__(self, lines: Callable[[], Sequence[Line]]) -> None:
        self._lines = lines

    def collect(self) -> Iterator[Metric]:
        lines = self._lines()
        if not lines:  # a server without an engine
            yield GaugeMetricFamily("tidegate_engine_up", _UP, value=0.0)
            return
        names = ["role", "address"] if lines[0].role else []
        labels = [[line.role, line.engine.address] if names else [] for line in lines]
        up = GaugeMetricFamily("tidegate_engine_up", _UP, labels=names)
        for line, label in zip(lines, labels, strict=True):
            up.add_metric(label, float(line.engine.is_ready))
        yield up
        told = [(label, line.engine.stats) for line, label in zip(lines, labels, strict=True)]
        yield from engine_series([(label, stats) for label, stats in told if stats], names)


def engine_series(
    told: Sequence[tuple[list[str], EngineStats]], names: list[str]
) -> Iterator[Metric]:
    """told: (label values, what the engine says of itself), of those that have spoken"""
    if not told:
        return
    for name, about in _GAUGES.items():
        gauge = GaugeMetricFamily(f"tidegate_engine_{name}", about, labels=names)
        for label, stats in told:
            gauge.add_metric(label, getattr(stats, name))
        yield gauge
    usage = GaugeMetricFamily("tidegate_engine_kv_usage_ratio", _USAGE, labels=names)
    for label, stats in told:
        held = stats.total_blocks - stats.free_blocks
        usage.add_metric(label, held / stats.total_blocks if stats.total_blocks else 0.0)
    yield usage
    for name, (about, of) in _LABELLED_GAUGES.items():
        gauge = GaugeMetricFamily(f"tidegate_engine_{name}", about, labels=[*names, of])
        for label, stats in told:
            for value, count in sorted(getattr(stats, name).items()):
                gauge.add_metric([*label, value], count)
        yield gauge
    for field, (name, about) in _COUNTERS.items():
        counter = CounterMetricFamily(f"tidegate_engine_{name}", about, labels=names)
        for label, stats in told:
            counter.add_metric(label, getattr(stats, field))
        yield counter
    for field, (name, about, of) in _LABELLED.items():
        counter = CounterMetricFamily(f"tidegate_engine_{name}", about, labels=[*names, of])
        for label, stats in told:
            for value, count in sorted(getattr(stats, field).items()):
                counter.add_metric([*label, value], count)
        yield counter


_UP = "1 while the engine takes requests"
_USAGE = "Of all KV blocks, the share that requests or leases hold"
_GAUGES = {
    "draining": "1 while the engine takes nothing new",
    "running": "Requests that hold a slot",
    "waiting": "Requests that wait for a slot",
    "waiting_tokens": "Prompt tokens of the requests that wait",
    "free_blocks": "KV blocks that are free or may be reused",
    "total_blocks": "KV blocks in all",
    "clients": "Connected clients",
    "fetching": "K/V fetches that are under way",
    "leases": "Prompts whose K/V is kept for other engines",
    "leased_blocks": "KV blocks that are kept for other engines",
}
"""field of EngineStats, and end of the series' name -> its help"""
_LABELLED_GAUGES = {
    "tier_blocks": ("KV blocks that the tier holds and that can be loaded", "tier"),
    "tier_bytes": ("Bytes that the tier holds", "tier"),
}
"""field of EngineStats, and end of the series' name -> its help, its label"""
_COUNTERS = {
    "num_steps": ("steps", "Steps computed"),
    "num_accepted": ("accepted", "Requests accepted"),
    "num_refused": ("refused", "Requests refused"),
    "num_refused_early": (
        "refused_early",
        "Requests that a gateway refused without asking, as the engine had just refused others",
    ),
    "num_prompt_tokens": ("prompt_tokens", "Prompt tokens of accepted requests"),
    "num_cached_tokens": ("cached_tokens", "Prompt tokens found in the prefix cache"),
    "num_computed_tokens": ("computed_tokens", "Positions computed, guesses included"),
    "num_fetched_tokens": ("fetched_tokens", "Prompt tokens whose K/V came from elsewhere"),
    "num_fetched_bytes": ("fetched_bytes", "Bytes of K/V that came from elsewhere"),
    "num_generated_tokens": ("generated_tokens", "Tokens sampled"),
    "num_preemptions": ("preemptions", "Requests that gave their blocks back to be computed again"),
    "num_draft_tokens": ("draft_tokens", "Tokens that were guessed ahead, to be verified"),
    "num_accepted_tokens": ("accepted_tokens", "Guessed tokens that are in answers"),
    "num_wire_errors": ("wire_errors", "Frames that were no message"),
    "busy_s": ("busy_seconds", "Time spent waiting for workers' results"),
}
"""field of EngineStats -> (end of the series' name, its help)"""
_LABELLED = {
    "num_finished": ("finished", "Requests ended, by reason", "reason"),
    "num_fetches_failed": ("fetches_failed", "K/V fetches that failed, by kind", "kind"),
    "num_timeouts": (
        "timeouts",
        "where",
        "Requests that were too late: waiting in the queue, or running",
    ),
    "num_leases_ended": (
        "leases_ended",
        "Prompts that were kept for other engines, by what ended that",
        "cause",
    ),
    "num_tier_stored": ("tier_blocks_stored", "KV blocks copied to the tier", "tier"),
    "num_tier_dropped": (
        "tier_blocks_dropped",
        "KV blocks that the tier had no room or time for",
        "tier",
    ),
    "num_tier_loaded": ("tier_blocks_loaded", "KV blocks loaded instead of computed", "tier"),
    "num_tier_failed": ("tier_blocks_failed", "KV blocks that were gone, or damaged", "tier"),
}
"""field of EngineStats -> (end of the series' name, its help, its label)"""
