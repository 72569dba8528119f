"""What engines tell of themselves with each heartbeat, as Prometheus series.

Any process of a gateway tells the same; where there are several engines, their series have the
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
    """lines: to the engines; none where the server has none"""

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
        told = [(label, line.engine.stats) for line, label in zip(lines, labels, strict=True)]
        yield from engine_series([(label, stats) for label, stats in told if stats], names)


def engine_series(
    told: Sequence[tuple[list[str], EngineStats]], names: list[str]
) -> Iterator[Metric]:
    """told: (label values, what the engine says of itself), of those that have spoken"""
    if not told:
        return
    for series in ENGINE_SERIES:
        family = series.family(names)
        for label, stats in told:
            value = getattr(stats, series.field)
            if series.label:
                for key, count in sorted(value.items()):
                    family.add_metric([*label, key], count)
            else:
                family.add_metric(label, value)
        yield family
    usage = GaugeMetricFamily("tidegate_engine_kv_usage_ratio", _USAGE, labels=names)
    for label, stats in told:
        held = stats.total_blocks - stats.free_blocks
        usage.add_metric(label, held / stats.total_blocks if stats.total_blocks else 0.0)
    yield usage


_UP = "1 while the engine takes requests"
_USAGE = "Of all KV blocks, the share that requests or leases hold"


class EngineSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One field of `EngineStats` as a series. Members are given by name: all of them are texts."""

    #: Of `EngineStats`. A counter's field begins with `num_`, or is `busy_s`.
    field: str
    #: Without `tidegate_engine_`, and without the `_total` of a counter.
    name: str
    help: str
    #: Of a field that is a mapping: the name of the label that its keys are.
    label: str = ""
    is_counter: bool = True

    def family(self, labels: Sequence[str]) -> GaugeMetricFamily | CounterMetricFamily:
        """Return the series without samples; `labels` are those that all of an engine have."""
        kind = CounterMetricFamily if self.is_counter else GaugeMetricFamily
        own = [self.label] if self.label else []
        return kind(f"tidegate_engine_{self.name}", self.help, labels=[*labels, *own])


def _gauge(name: str, *, help: str, label: str = "") -> EngineSeries:
    return EngineSeries(field=name, name=name, help=help, label=label, is_counter=False)


def _counter(name: str, *, help: str, label: str = "", field: str = "") -> EngineSeries:
    return EngineSeries(field=field or f"num_{name}", name=name, help=help, label=label)


ENGINE_SERIES = (
    _gauge("draining", help="1 while the engine takes nothing new"),
    _gauge("running", help="Requests that hold a slot"),
    _gauge("waiting", help="Requests that wait for a slot"),
    _gauge("waiting_tokens", help="Prompt tokens of the requests that wait"),
    _gauge("free_blocks", help="KV blocks that are free or may be reused"),
    _gauge("total_blocks", help="KV blocks in all"),
    _gauge("clients", help="Connected clients"),
    _gauge("fetching", help="K/V fetches that are under way"),
    _gauge("leases", help="Prompts whose K/V is kept for other engines"),
    _gauge("leased_blocks", help="KV blocks that are kept for other engines"),
    _gauge(
        "tier_blocks", help="KV blocks that the tier holds and that can be loaded", label="tier"
    ),
    _gauge("tier_bytes", help="Bytes that the tier holds", label="tier"),
    _counter("steps", help="Steps computed"),
    _counter("accepted", help="Requests accepted"),
    _counter("refused", help="Requests refused"),
    _counter("refused_early", help="Requests rejected by a gateway from a cached engine refusal"),
    _counter("prompt_tokens", help="Prompt tokens of accepted requests"),
    _counter("cached_tokens", help="Prompt tokens found in the prefix cache"),
    _counter("computed_tokens", help="Positions computed, guesses included"),
    _counter("fetched_tokens", help="Prompt tokens whose K/V came from elsewhere"),
    _counter("fetched_bytes", help="Bytes of K/V that came from elsewhere"),
    _counter("generated_tokens", help="Tokens sampled"),
    _counter("preemptions", help="Requests that gave their blocks back to be computed again"),
    _counter("draft_tokens", help="Tokens that were guessed ahead, to be verified"),
    _counter("accepted_tokens", help="Guessed tokens that are in answers"),
    _counter("wire_errors", help="Frames that were no message"),
    _counter("busy_seconds", help="Time spent waiting for workers' results", field="busy_s"),
    _counter("finished", help="Requests ended, by reason", label="reason"),
    _counter("fetches_failed", help="K/V fetches that failed, by kind", label="kind"),
    _counter(
        "timeouts",
        help="Requests that were too late: waiting in the queue, or running",
        label="where",
    ),
    _counter(
        "leases_ended",
        help="Prompts that were kept for other engines, by what ended that",
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
        help="KV blocks that the tier had no room or time for",
        label="tier",
        field="num_tier_dropped",
    ),
    _counter(
        "tier_blocks_loaded",
        help="KV blocks loaded instead of computed",
        label="tier",
        field="num_tier_loaded",
    ),
    _counter(
        "tier_blocks_failed",
        help="KV blocks that were gone, or damaged",
        label="tier",
        field="num_tier_failed",
    ),
)
