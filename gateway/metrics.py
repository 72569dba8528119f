"""What a gateway counts, as Prometheus text. Names and meanings: docs/metrics.md.

All but two gauges are sums over the records of requests (record.py), taken in one place, `count`,
when a request is over: so they agree with the access log, aborts, refusals and failures included.

Series add up over all processes on the port: with more than one, `gunicorn_conf` names a directory
in PROMETHEUS_MULTIPROC_DIR before this module is imported, prometheus_client keeps the values in
files there, and whichever process is scraped reads all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from gateway.aliases import aliased
from gateway.engine_client import Line
from gateway.engine_metrics import EngineCollector
from gateway.record import AnswerRecord, ChoiceRecord, Record
from protocol.messages import Times

CONTENT_TYPE = CONTENT_TYPE_LATEST
MULTIPROCESS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
COUNT_BUCKETS = tuple(float(d * 10**n) for n in range(6) for d in (1, 2, 5))
CHOICE_BUCKETS = (1, 2, 5, 10, 20, 50, 100)
SHARE_BUCKETS = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
STAGES = {
    "queue": "queued_s",
    "grammar": "grammar_s",
    "fetch": "fetching_s",
    "prefill": "prefill_s",
    "decode": "decode_s",
    "preempted": "preempted_s",
}
"""Label of `tidegate_stage_seconds` -> field of Times; beside these there is "tokenize"."""


class Metrics:
    """lines       to the engines, whose last words on themselves are told
    model_name  as the API calls the model; "" before it is known
    """

    def __init__(
        self, lines: Callable[[], Sequence[Line]], model_name: Callable[[], str] = lambda: ""
    ) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._engines = EngineCollector(lines)
        self.open_answers = Gauge(
            "tidegate_open_answers",
            "Inference requests being answered now",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self.requests = self._counter("requests", "HTTP requests", "route", "status")
        self.ends = self._counter("request_ends", "HTTP requests, without probes", "end")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of accepted prompts")
        self.cached_tokens = self._counter("cached_tokens", "Of these, tokens found in a cache")
        self.generated_tokens = self._counter(
            "generated_tokens", "Tokens generated for clients, as far as they were read"
        )
        self.finishes = self._counter("answers", "Answers by how they ended", "finish")
        self.choices = self._counter(
            "choices", "Choices of accepted answers, by how they ended", "finish"
        )
        self.first_token_s = self._seconds(
            "time_to_first_token", "From the beginning of a request to its first token"
        )
        self.token_s = self._seconds(
            "time_per_output_token",
            "Of a choice, the mean time between two of its tokens",
            buckets=TOKEN_BUCKETS,
        )
        self.request_s = self._seconds(
            "request",
            "From the beginning of an accepted inference request to its end",
            "route",
            buckets=REQUEST_BUCKETS,
        )
        self.stage_s = self._seconds("stage", "Where the time of accepted requests went", "stage")
        self.inference_s = self._seconds(
            "inference",
            "Of an accepted request: prefill, decode and what was computed again",
            buckets=REQUEST_BUCKETS,
        )
        self.request_prompt_tokens = self._numbers("prompt_tokens", "Tokens of prompts")
        self.request_generated_tokens = self._numbers("generated_tokens", "Tokens generated")
        self.request_max_tokens = self._numbers("max_tokens", "max_tokens, where it was given")
        self.request_choices = self._numbers("choices", "Choices asked for", CHOICE_BUCKETS)
        self.draft_acceptance = Histogram(
            "tidegate_draft_acceptance",
            "Of the tokens that were guessed ahead for a request, the share that is in its answers",
            buckets=SHARE_BUCKETS,
            registry=self._registry,
        )
        self.free_s = self._seconds(
            "disconnect_to_free",
            "From noticing that a client has gone until the engine has its slots and blocks back",
        )
        self.handovers = self._counter(
            "handovers", "Requests whose prompt one engine computed and another went on from"
        )
        self.fallbacks = self._counter(
            "handover_fallbacks",
            "Requests whose prompt the decode engine computed although another should have",
            "cause",
        )

        self.wire_errors = self._counter(
            "gateway_wire_errors", "Messages of an engine that made no sense, and were dropped"
        )

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"tidegate_{name}", about, labels, registry=self._registry)

    def _seconds(
        self, name: str, about: str, *labels: str, buckets: Sequence[float] = WAIT_BUCKETS
    ) -> Histogram:
        full = f"tidegate_{name}_seconds"
        return Histogram(full, about, labels, buckets=buckets, registry=self._registry)

    def _numbers(
        self, name: str, about: str, buckets: Sequence[float] = COUNT_BUCKETS
    ) -> Histogram:
        about = f"Per accepted request: {about[0].lower()}{about[1:]}"
        return Histogram(
            f"tidegate_request_{name}", about, buckets=buckets, registry=self._registry
        )

    # ---- counting

    def count(self, record: Record) -> None:
        """A request that is over, once."""
        self.requests.labels(record.route, str(record.status)).inc()
        if not record.is_probe:
            self.ends.labels(record.end).inc()
        if record.answer is None:
            return
        self.finishes.labels(record.answer.finish).inc()
        if record.answer.is_accepted:
            self.request_s.labels(record.route).observe(record.took_s)
            self._count_answer(record.answer)

    def _count_answer(self, answer: AnswerRecord) -> None:
        self.prompt_tokens.inc(answer.prompt_tokens)
        self.cached_tokens.inc(answer.cached_tokens)
        self.generated_tokens.inc(answer.generated_tokens)
        self.request_prompt_tokens.observe(answer.prompt_tokens)
        self.request_generated_tokens.observe(answer.generated_tokens)
        self.request_choices.observe(len(answer.choices))
        if answer.first_token_s is not None:
            self.first_token_s.observe(answer.first_token_s)
        if answer.draft_tokens:
            self.draft_acceptance.observe(answer.accepted_tokens / answer.draft_tokens)
        self._count_choices(answer.choices)
        self._count_times(answer)

    def _count_choices(self, choices: Iterable[ChoiceRecord]) -> None:
        for choice in choices:
            self.choices.labels(choice.finish).inc()
            if choice.max_tokens is not None:
                self.request_max_tokens.observe(choice.max_tokens)
            if choice.times is not None and choice.generated_tokens > 1:
                gaps = choice.generated_tokens - 1
                self.token_s.observe(choice.times.decode_s / gaps)

    def _count_times(self, answer: AnswerRecord) -> None:
        self.stage_s.labels("tokenize").observe(answer.tokenize_s)
        if all(choice.times is None for choice in answer.choices):
            return  # it ended before the engine had told any
        times: Times = answer.times
        for stage, field in STAGES.items():
            self.stage_s.labels(stage).observe(getattr(times, field))
        self.inference_s.observe(times.prefill_s + times.decode_s)

    # ---- telling

    def text(self) -> bytes:
        if os.environ.get(MULTIPROCESS_DIRECTORY):
            everybody = CollectorRegistry()
            MultiProcessCollector(everybody)  # type: ignore[no-untyped-call]
        else:
            everybody = self._registry
        ours = [*everybody.collect(), *self._engines.collect()]
        told = CollectorRegistry()
        told.register(_Collected([*ours, *aliased(ours, self._model_name())]))
        return generate_latest(told)


class _Collected(Collector):
    """Collected once: to read what all processes counted takes a while."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
