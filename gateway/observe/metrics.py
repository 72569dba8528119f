"""The metrics of a gateway, as Prometheus text. docs/metrics.md lists their names and meanings.

Most metrics are sums over `RequestRecord`s. Only `Metrics.count` adds to them, when a request ends.
So they agree with the access log, and they include aborted, refused and failed requests. The
exceptions are `tidegate_open_answers`, the time to release the resources of a disconnected client,
and a few counters of faults, which callers change directly.

A scrape returns the sums over all processes on the port. If there are several processes,
`gunicorn_conf` sets PROMETHEUS_MULTIPROC_DIR before this module is imported. prometheus_client then
keeps the values in files in that directory, and the scraped process reads the files of all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from gateway.engine.client import ConnectedEngine
from gateway.generation.record import AnswerRecord, ChoiceRecord, RequestRecord
from gateway.observe.engine_metrics import EngineCollector
from gateway.observe.metric_specs import GatewaySeries
from gateway.observe.vllm_names import aliased
from protocol.messages import Times

CONTENT_TYPE = CONTENT_TYPE_LATEST
MULTIPROCESS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
STAGES = {
    "queue": "queued_s",
    "grammar": "grammar_s",
    "fetch": "fetching_s",
    "prefill": "prefill_s",
    "decode": "decode_s",
    "preempted": "preempted_s",
}
"""Value of the label `stage` -> field of Times. The stage "tokenize" is not in Times, because the
engine does not measure it."""


class Metrics(GatewaySeries):
    """Counts requests and writes the body of `/metrics`.

    connections  returns the connections to the engines, whose last statistics are exported
    model_name   returns the main name of the served model; "" before a model was reported
    """

    def __init__(
        self,
        connections: Callable[[], Sequence[ConnectedEngine]],
        model_name: Callable[[], str] = lambda: "",
    ) -> None:
        super().__init__(CollectorRegistry())
        self._model_name = model_name
        self._engines = EngineCollector(connections)

    # ---- counting

    def count(self, record: RequestRecord) -> None:
        """Add a request that has ended. Call this once for each request."""
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
            return  # the request ended before the engine reported any times
        times: Times = answer.times
        for stage, field in STAGES.items():
            self.stage_s.labels(stage).observe(getattr(times, field))
        self.inference_s.observe(times.prefill_s + times.decode_s)

    # ---- exporting

    def text(self) -> bytes:
        """Return the body of `/metrics`."""
        if os.environ.get(MULTIPROCESS_DIRECTORY):
            source = CollectorRegistry()
            MultiProcessCollector(source)  # type: ignore[no-untyped-call]
        else:
            source = self.registry
        ours = [*source.collect(), *self._engines.collect()]
        exported = CollectorRegistry()
        exported.register(_Collected([*ours, *aliased(ours, self._model_name())]))
        return generate_latest(exported)


class _Collected(Collector):
    """A collector that returns metrics which were collected before.

    Each metric is exported under its own name and under its aliases. Collecting the metrics only
    once saves time, because it reads the files of all processes.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
