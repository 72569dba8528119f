"""The statistics of the engines, as of their last heartbeats, as Prometheus series.

Every gateway process exports the same values. If there are several engines, their series have the
labels `role` and `address`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.engine.client import ClientLine
from protocol.stats import EngineStats


class EngineCollector(Collector):
    """Exports the statistics of all engines. `lines` returns an empty list without an engine."""

    def __init__(self, lines: Callable[[], Sequence[ClientLine]]) -> None:
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
        found = [(label, line.engine.stats) for line, label in zip(lines, labels, strict=True)]
        yield from engine_series([(label, stats) for label, stats in found if stats], names)


def engine_series(
    engines: Sequence[tuple[list[str], EngineStats]], names: list[str]
) -> Iterator[Metric]:
    """Yield the series of `engines`: (label values, statistics) of each that sent any."""
    if not engines:
        return
    for series in ENGINE_SERIES:
        family = series.family(names)
        for label, stats in engines:
            value = getattr(stats, series.field)
            if series.label:
                for key, count in sorted(value.items()):
                    family.add_metric([*label, key], count)
            else:
                family.add_metric(label, value)
        yield family
    usage = GaugeMetricFamily("tidegate_engine_kv_usage_ratio", _USAGE, labels=names)
    for label, stats in engines:
        held = stats.total_blocks - stats.free_blocks
        usage.add_metric(label, held / stats.total_blocks if stats.total_blocks else 0.0)
    yield usage


_UP = "1 while the engine accepts requests"
_USAGE = "Share of the KV blocks held by requests or leases"


class EngineSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One field of `EngineStats` as a series."""

    #: Field of `EngineStats`. A counter's field begins with `num_`, or is `busy_s`.
    field: str
    #: Without the prefix `tidegate_engine_` and a counter's suffix `_total`.
    name: str
    help: str
    #: If the field is a mapping: the label whose values are the mapping's keys.
    label: str = ""
    is_counter: bool = True

    def family(self, labels: Sequence[str]) -> GaugeMetricFamily | CounterMetricFamily:
        """Return the series without samples. `labels` are common to all series of an engine."""
        kind = CounterMetricFamily if self.is_counter else GaugeMetricFamily
        own = [self.label] if self.label else []
        return kind(f"tidegate_engine_{self.name}", self.help, labels=[*labels, *own])


def _gauge(name: str, *, help: str, label: str = "") -> EngineSeries:
    return EngineSeries(field=name, name=name, help=help, label=label, is_counter=False)


def _counter(name: str, *, help: str, label: str = "", field: str = "") -> EngineSeries:
    return EngineSeries(field=field or f"num_{name}", name=name, help=help, label=label)


ENGINE_SERIES = (
    _gauge("draining", help="1 while the engine finishes its requests and accepts no new ones"),
    _gauge("running", help="Requests that hold a slot"),
    _gauge("waiting", help="Requests waiting for a slot"),
    _gauge("waiting_tokens", help="Prompt tokens of waiting requests"),
    _gauge("free_blocks", help="KV blocks that are free or reusable"),
    _gauge("total_blocks", help="KV blocks in total"),
    _gauge("clients", help="Connected clients"),
    _gauge("fetching", help="K/V fetches in progress"),
    _gauge("leases", help="Prompts whose K/V is kept for other engines"),
    _gauge("leased_blocks", help="KV blocks kept for other engines"),
    _gauge("tier_blocks", help="KV blocks in the tier that can be loaded", label="tier"),
    _gauge("tier_bytes", help="Bytes stored in the tier", label="tier"),
    _counter("steps", help="Steps computed"),
    _counter("accepted", help="Requests accepted"),
    _counter("refused", help="Requests refused"),
    _counter("refused_early", help="Requests rejected by a gateway from a cached engine refusal"),
    _counter("prompt_tokens", help="Prompt tokens of accepted requests"),
    _counter("cached_tokens", help="Prompt tokens found in the prefix cache"),
    _counter("computed_tokens", help="Positions computed, draft tokens included"),
    _counter("fetched_tokens", help="Prompt tokens whose K/V was fetched from another engine"),
    _counter("fetched_bytes", help="Bytes of K/V fetched from other engines"),
    _counter("generated_tokens", help="Tokens sampled"),
    _counter("preemptions", help="Preemptions: requests that gave up their slot and blocks"),
    _counter("draft_tokens", help="Draft tokens verified"),
    _counter("accepted_tokens", help="Draft tokens accepted"),
    _counter("wire_errors", help="Malformed messages received"),
    _counter("busy_seconds", help="Time spent waiting for the worker's results", field="busy_s"),
    _counter("finished", help="Requests finished, by reason", label="reason"),
    _counter("fetches_failed", help="K/V fetches that failed, by kind", label="kind"),
    _counter(
        "timeouts",
        help="Requests that exceeded a time limit, in the queue or running",
        label="where",
    ),
    _counter(
        "leases_ended",
        help="Ended leases of prompts kept for other engines, by cause",
        label="cause",
    ),
    _counter(
        "tier_blocks_stored",
        help="KV blocks copied to the tier",
        label="tier",
        field="num_tier_stored",
    ),
    _counter(
        "tier_blocks_dropped",
        help="KV blocks not stored because the tier was full or too slow",
        label="tier",
        field="num_tier_dropped",
    ),
    _counter(
        "tier_blocks_loaded",
        help="KV blocks loaded from the tier",
        label="tier",
        field="num_tier_loaded",
    ),
    _counter(
        "tier_blocks_failed",
        help="KV blocks that could not be loaded: missing or damaged",
        label="tier",
        field="num_tier_failed",
    ),
)
