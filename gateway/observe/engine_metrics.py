"""The statistics of the engines, from their last heartbeats, as Prometheus metrics.

Every gateway process exports the same values. If there are several engines, each one's values have
the labels `role` and `address`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.engine.client import ConnectedEngine
from gateway.observe.metric_specs import MetricSpec
from protocol.stats import EngineStats


class EngineCollector(Collector):
    """Exports the statistics of all engines.

    connections  returns the connections to the engines; empty on a server without an engine
    """

    def __init__(self, connections: Callable[[], Sequence[ConnectedEngine]]) -> None:
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        connections = self._connections()
        if not connections:
            yield GaugeMetricFamily("tidegate_engine_up", _UP, value=0.0)
            return
        names = ["role", "address"] if connections[0].role else []
        engines = [
            ([each.role, each.client.address] if names else [], each.client) for each in connections
        ]
        up = GaugeMetricFamily("tidegate_engine_up", _UP, labels=names)
        for values, client in engines:
            up.add_metric(values, float(client.is_ready))
        yield up
        found = [(values, client.stats) for values, client in engines]
        yield from engine_metrics([(values, stats) for values, stats in found if stats], names)


def engine_metrics(
    engines: Sequence[tuple[list[str], EngineStats]], names: list[str]
) -> Iterator[Metric]:
    """Yield all metrics of the engines.

    engines  (label values, statistics) of each engine that has sent statistics
    names    names of the labels that all metrics have
    """
    if not engines:
        return
    for metric in ENGINE_METRICS:
        family = metric.family(names)
        for values, stats in engines:
            value = getattr(stats, metric.field)
            counts = sorted(value.items()) if metric.labels else [(None, value)]
            for key, count in counts:
                family.add_metric(values if key is None else [*values, key], count)
        yield family
    usage = GaugeMetricFamily("tidegate_engine_kv_usage_ratio", _USAGE, labels=names)
    for values, stats in engines:
        held = stats.total_blocks - stats.free_blocks
        usage.add_metric(values, held / stats.total_blocks if stats.total_blocks else 0.0)
    yield usage


_UP = "1 while the engine accepts requests"
_USAGE = "Share of the KV blocks held by requests or leases"


@dataclass(frozen=True, kw_only=True)
class EngineMetric(MetricSpec):
    """A metric whose value is a field of `EngineStats`."""

    #: Name of the field. If the field is a mapping, the metric has one label, and the keys of the
    #: mapping are the label's values.
    field: str
    kind: type[GaugeMetricFamily | CounterMetricFamily]

    def family(self, labels: Sequence[str]) -> GaugeMetricFamily | CounterMetricFamily:
        """Return the metric without samples. `labels` are the labels that all metrics have."""
        return self.kind(self.name, self.help, labels=[*labels, *self.labels])


def _gauge(name: str, help: str, *labels: str) -> EngineMetric:
    full_name = f"tidegate_engine_{name}"
    return EngineMetric(
        name=full_name, help=help, labels=labels, field=name, kind=GaugeMetricFamily
    )


def _counter(name: str, help: str, *labels: str, field: str = "") -> EngineMetric:
    return EngineMetric(
        name=f"tidegate_engine_{name}",
        help=help,
        labels=labels,
        field=field or f"num_{name}",
        kind=CounterMetricFamily,
    )


ENGINE_METRICS = (
    _gauge("draining", "1 while the engine finishes its requests and accepts no new ones"),
    _gauge("running", "Requests that hold a slot"),
    _gauge("waiting", "Requests waiting for a slot"),
    _gauge("waiting_tokens", "Prompt tokens of waiting requests"),
    _gauge("free_blocks", "KV blocks that are free or reusable"),
    _gauge("total_blocks", "KV blocks in total"),
    _gauge("clients", "Connected clients"),
    _gauge("fetching", "K/V fetches in progress"),
    _gauge("leases", "Prompts whose K/V is kept for other engines"),
    _gauge("leased_blocks", "KV blocks kept for other engines"),
    _gauge("tier_blocks", "KV blocks in the tier that can be loaded", "tier"),
    _gauge("tier_bytes", "Bytes stored in the tier", "tier"),
    _counter("steps", "Steps computed"),
    _counter("accepted", "Requests accepted"),
    _counter("refused", "Requests refused"),
    _counter("refused_early", "Requests rejected by a gateway from a cached engine refusal"),
    _counter("prompt_tokens", "Prompt tokens of accepted requests"),
    _counter("cached_tokens", "Prompt tokens found in the prefix cache"),
    _counter("computed_tokens", "Positions computed, draft tokens included"),
    _counter("fetched_tokens", "Prompt tokens whose K/V was fetched from another engine"),
    _counter("fetched_bytes", "Bytes of K/V fetched from other engines"),
    _counter("generated_tokens", "Tokens sampled"),
    _counter("preemptions", "Preemptions: requests that gave up their slot and blocks"),
    _counter("draft_tokens", "Draft tokens verified"),
    _counter("accepted_tokens", "Draft tokens accepted"),
    _counter("wire_errors", "Malformed messages received"),
    _counter("busy_seconds", "Time spent waiting for the worker's results", field="busy_s"),
    _counter("finished", "Requests finished, by reason", "reason"),
    _counter("fetches_failed", "K/V fetches that failed, by kind", "kind"),
    _counter("timeouts", "Requests that exceeded a time limit, in the queue or running", "where"),
    _counter("leases_ended", "Ended leases of prompts kept for other engines, by cause", "cause"),
    _counter("tier_blocks_stored", "KV blocks copied to the tier", "tier", field="num_tier_stored"),
    _counter(
        "tier_blocks_dropped",
        "KV blocks not stored because the tier was full or too slow",
        "tier",
        field="num_tier_dropped",
    ),
    _counter(
        "tier_blocks_loaded", "KV blocks loaded from the tier", "tier", field="num_tier_loaded"
    ),
    _counter(
        "tier_blocks_failed",
        "KV blocks that could not be loaded: missing or damaged",
        "tier",
        field="num_tier_failed",
    ),
)
