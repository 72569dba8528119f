"""The metrics of a gateway process, each declared once with its name, help, labels and buckets.

A test compares docs/operate/metrics.md with this file. The metrics of engines are in metrics.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

M = TypeVar("M", Counter, Gauge, Histogram)

WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
COUNT_BUCKETS = tuple(float(d * 10**n) for n in range(6) for d in (1, 2, 5))
CHOICE_BUCKETS = (1, 2, 5, 10, 20, 50, 100)
SHARE_BUCKETS = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)


@dataclass(frozen=True)
class MetricSpec:
    """Declaration of one metric."""

    #: Name of the metric. A counter is exported with the suffix `_total`.
    name: str
    help: str
    #: Names of the labels.
    labels: Sequence[str] = ()
    #: Upper bounds of a histogram's buckets. Other metrics have none.
    buckets: Sequence[float] = ()
    #: prometheus_client's mode of combining a gauge's values from several processes.
    multiprocess_mode: str = ""

    def make(self, kind: type[M], registry: CollectorRegistry) -> M:
        """Register and return the metric; `kind` is Counter, Gauge or Histogram."""
        options: dict[str, Any] = {"buckets": self.buckets} if self.buckets else {}
        if self.multiprocess_mode:
            options["multiprocess_mode"] = self.multiprocess_mode
        return kind(self.name, self.help, self.labels, registry=registry, **options)


MODEL_LABEL = "model_name"
"""Label of a metric's model, as in vLLM's metrics. Only servers with several models have it."""


class GatewaySeries:
    """The metrics of a gateway process. `Metrics` adds to them.

    models  main names of the models if there are several; empty if there is only one. Then the
            sums over answers have no label MODEL_LABEL
    """

    def __init__(self, registry: CollectorRegistry, models: Sequence[str] = ()) -> None:
        self.registry = registry
        self._models = models
        #: The declarations of all metrics, in the order of their registration.
        self.specs: list[MetricSpec] = []
        self._add_counts()
        self._add_times()
        self._add_per_request()
        self._add_faults()
        self._add_batches()

    def _add_counts(self) -> None:
        open_spec = MetricSpec(
            "tidegate_open_answers", "Inference requests in progress", multiprocess_mode="livesum"
        )
        self.open_answers = self._add(Gauge, open_spec)
        self.requests = self._counter("tidegate_requests", "HTTP requests", "route", "status")
        self.ends = self._counter(
            "tidegate_request_ends",
            "HTTP requests by how they ended, without health checks and scrapes",
            "end",
        )
        self.prompt_tokens = self._answer_counter(
            "tidegate_prompt_tokens", "Prompt tokens of accepted requests"
        )
        self.cached_tokens = self._answer_counter(
            "tidegate_cached_tokens", "Prompt tokens found in a cache"
        )
        self.image_tokens = self._answer_counter(
            "tidegate_image_tokens", "Prompt tokens of images, of accepted requests"
        )
        self.images = self._answer_counter(
            "tidegate_images",
            "Images of requests that were sent to an engine, by whether they were in the cache of "
            "preprocessed images: hit or miss",
            "cache",
        )
        self.image_s = self._answer_counter(
            "tidegate_image_seconds",
            "Time spent on images before they are sent to an engine, by stage: fetch, decode, "
            "preprocess",
            "stage",
        )
        self.generated_tokens = self._answer_counter(
            "tidegate_generated_tokens",
            "Generated tokens, up to the end of the answer or the disconnect of its client",
        )
        self.finishes = self._answer_counter(
            "tidegate_answers", "Inference requests by finish reason", "finish"
        )
        self.choices = self._answer_counter(
            "tidegate_choices", "Choices of accepted requests, by finish reason", "finish"
        )

    def _add_times(self) -> None:
        self.first_token_s = self._answer_histogram(
            "tidegate_time_to_first_token_seconds",
            "Time from the start of a request to its first token",
            WAIT_BUCKETS,
        )
        self.token_s = self._answer_histogram(
            "tidegate_time_per_output_token_seconds",
            "Mean time between two tokens of a choice",
            TOKEN_BUCKETS,
        )
        self.request_s = self._answer_histogram(
            "tidegate_request_seconds",
            "Time from the start of an accepted inference request to its end",
            REQUEST_BUCKETS,
            "route",
        )
        self.stage_s = self._answer_histogram(
            "tidegate_stage_seconds",
            "Time that accepted requests spent in each stage",
            WAIT_BUCKETS,
            "stage",
        )
        self.inference_s = self._answer_histogram(
            "tidegate_inference_seconds",
            "Time that accepted requests spent in prefill and decode, recomputation included",
            REQUEST_BUCKETS,
        )

    def _add_per_request(self) -> None:
        self.request_prompt_tokens = self._answer_histogram(
            "tidegate_request_prompt_tokens", "Prompt tokens per accepted request", COUNT_BUCKETS
        )
        self.request_generated_tokens = self._answer_histogram(
            "tidegate_request_generated_tokens",
            "Generated tokens per accepted request",
            COUNT_BUCKETS,
        )
        self.request_max_tokens = self._answer_histogram(
            "tidegate_request_max_tokens",
            "max_tokens of each choice of an accepted request, if the request set it",
            COUNT_BUCKETS,
        )
        self.request_choices = self._answer_histogram(
            "tidegate_request_choices", "Choices per accepted request", CHOICE_BUCKETS
        )
        self.draft_acceptance = self._answer_histogram(
            "tidegate_draft_acceptance",
            "Share of a request's draft tokens that were accepted",
            SHARE_BUCKETS,
        )
        self.free_s = self._histogram(
            "tidegate_disconnect_to_free_seconds",
            "Time from a client's disconnect to the release of its slots and blocks in the engine",
            WAIT_BUCKETS,
        )

    def _add_faults(self) -> None:
        self.handovers = self._counter(
            "tidegate_handovers",
            "Requests whose prompt a prefill engine computed and a decode engine continued",
        )
        self.fallbacks = self._counter(
            "tidegate_handover_fallbacks",
            "Requests whose prompt was computed by the decode engine as a fallback, by cause",
            "cause",
        )
        self.routed = self._counter(
            "tidegate_routed_requests",
            "Prompts sent to one of several engines, by the reason for its choice",
            "reason",
        )
        self.moved = self._counter(
            "tidegate_moved_requests",
            "Engine requests that were sent to another engine, by cause",
            "cause",
        )
        self.wire_errors = self._counter(
            "tidegate_gateway_wire_errors",
            "Malformed messages from an engine, dropped by the gateway",
        )

    def _add_batches(self) -> None:
        self.open_batches = self._shared_gauge(
            "tidegate_open_batches", "Batches that have not ended, by status", "status"
        )
        paused = MetricSpec(
            "tidegate_paused_batches",
            "Batches that wait for room in the file store or on its disk",
            multiprocess_mode="livesum",
        )
        self.paused_batches = self._add(Gauge, paused)
        self.batch_lines = self._counter(
            "tidegate_batch_lines",
            "Lines of batches with a stored result, by result",
            "result",
        )
        self.file_store_bytes = self._shared_gauge(
            "tidegate_file_store_bytes", "Size of the file store"
        )
        self.file_store_limit = self._shared_gauge(
            "tidegate_file_store_limit_bytes", "Limit on the size of the file store"
        )

    def _shared_gauge(self, name: str, help: str, *labels: str) -> Gauge:
        """Return a gauge of something that all gateway processes share and report."""
        spec = MetricSpec(name, help, labels, multiprocess_mode="livemostrecent")
        return self._add(Gauge, spec)

    def _answer_counter(self, name: str, help: str, *labels: str) -> Counter:
        return self._with_models(self._counter(name, help, *self._model_label, *labels), labels)

    def _answer_histogram(
        self, name: str, help: str, buckets: Sequence[float], *labels: str
    ) -> Histogram:
        made = self._histogram(name, help, buckets, *self._model_label, *labels)
        return self._with_models(made, labels)

    @property
    def _model_label(self) -> Sequence[str]:
        return [MODEL_LABEL] if self._models else []

    def _with_models(self, metric: M, labels: Sequence[str]) -> M:
        """Return `metric` with a sample for each model, if its only label is that of the model. So
        it is exported before the first request, like a metric without labels."""
        for model in self._models if not labels else ():
            metric.labels(model)
        return metric

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return self._add(Counter, MetricSpec(name, help, labels))

    def _histogram(self, name: str, help: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return self._add(Histogram, MetricSpec(name, help, labels, buckets))

    def _add(self, kind: type[M], spec: MetricSpec) -> M:
        self.specs.append(spec)
        return spec.make(kind, self.registry)
