"""What a gateway counts, and what its engine tells, as Prometheus text.

Gateway series add up over all processes on the port: with more than one, `gunicorn_conf` names a
directory in PROMETHEUS_MULTIPROC_DIR before this module is imported, prometheus_client keeps the
values in files there, and whichever process is scraped reads all of them. Engine series come from
the last heartbeat, so any process tells the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

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

from protocol.stats import EngineStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
MULTIPROCESS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"


class Metrics:
    """is_up   the engine takes requests
    stats   the engine's last word on itself, if it has spoken
    """

    def __init__(
        self, *, is_up: Callable[[], bool], stats: Callable[[], EngineStats | None]
    ) -> None:
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
        self.open_answers = Gauge(
            "tidegate_open_answers",
            "Inference requests being answered now",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._engine = _EngineCollector(is_up, stats)

    def text(self) -> bytes:
        if os.environ.get(MULTIPROCESS_DIRECTORY):
            everybody = CollectorRegistry()
            MultiProcessCollector(everybody)  # type: ignore[no-untyped-call]
        else:
            everybody = self._registry
        engine = CollectorRegistry()
        engine.register(self._engine)
        return generate_latest(everybody) + generate_latest(engine)


class _EngineCollector(Collector):
    def __init__(self, is_up: Callable[[], bool], stats: Callable[[], EngineStats | None]) -> None:
        self._is_up = is_up
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "tidegate_engine_up", "1 while the engine takes requests", value=float(self._is_up())
        )
        stats = self._stats()
        if stats is None:
            return
        for name, about in _GAUGES.items():
            yield GaugeMetricFamily(f"tidegate_engine_{name}", about, value=getattr(stats, name))
        for field, (name, about) in _COUNTERS.items():
            yield CounterMetricFamily(f"tidegate_engine_{name}", about, value=getattr(stats, field))
        for field, (name, about, label) in _LABELLED.items():
            family = CounterMetricFamily(f"tidegate_engine_{name}", about, labels=[label])
            for value, count in sorted(getattr(stats, field).items()):
                family.add_metric([value], count)
            yield family


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
}
"""field of EngineStats -> (end of the series' name, its help, its label)"""
