"""What a gateway counts, and what its engine tells, as Prometheus text.

Gateway series add up over all processes on the port: with more than one, `gunicorn_conf` names a
directory in PROMETHEUS_MULTIPROC_DIR before this module is imported, prometheus_client keeps the
values in files there, and whichever process is scraped reads all of them. Engine series come from
the last heartbeat, so any process tells the same; where there are several engines, they have the
labels `role` and `address`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from gateway.engine_client import Line
from protocol.stats import EngineStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
ACCEPTANCE_BUCKETS = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
MULTIPROCESS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"


class Metrics:
    """lines  to the engines, whose last words on themselves are told"""

    def __init__(self, lines: Callable[[], Sequence[Line]]) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "tidegate_requests",
            "HTTP requests by route and status",
            ["route", "status"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "tidegate_prompt_tokens", "Tokens of accepted prompts", registry=registry
        )
        self.generated_tokens = Counter(
            "tidegate_generated_tokens", "Tokens generated for clients", registry=registry
        )
        self.finishes = Counter(
            "tidegate_answers", "Answers by how they ended", ["finish"], registry=registry
        )
        self.first_token_s = Histogram(
            "tidegate_time_to_first_token_seconds",
            "From reading the request to its first token",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.request_s = Histogram(
            "tidegate_request_seconds",
            "From reading an inference request to its end",
            ["route"],
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self.draft_acceptance = Histogram(
            "tidegate_draft_acceptance",
            "Of the tokens that were guessed ahead for a request, the share that is in its answers",
            buckets=ACCEPTANCE_BUCKETS,
            registry=registry,
        )
        self.open_answers = Gauge(
            "tidegate_open_answers",
            "Inference requests being answered now",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.handovers = Counter(
            "tidegate_handovers",
            "Requests whose prompt one engine computed and another went on from",
            registry=registry,
        )
        self.fallbacks = Counter(
            "tidegate_handover_fallbacks",
            "Requests whose prompt the decode engine computed although another should have",
            ["cause"],
            registry=registry,
        )
        self.wire_errors = Counter(
            "tidegate_gateway_wire_errors",
            "Messages of an engine that made no sense, and were dropped",
            registry=registry,
        )
        self._engines = _EngineCollector(lines)

    def text(self) -> bytes:
        if os.environ.get(MULTIPROCESS_DIRECTORY):
            everybody = CollectorRegistry()
            MultiProcessCollector(everybody)  # type: ignore[no-untyped-call]
        else:
            everybody = self._registry
        engine = CollectorRegistry()
        engine.register(self._engines)
        return generate_latest(everybody) + generate_latest(engine)


class _EngineCollector(Collector):
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
_GAUGES = {
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
