"""The metrics of a gateway, as Prometheus text. docs/operate/metrics.md lists their names and
meanings.

Most metrics are sums over `RequestRecord`s. Only `Metrics.count` adds to them, when a request ends.
So they agree with the access log, and they include aborted, refused and failed requests. The
exceptions are `tidegate_open_answers`, the time to release the resources of a disconnected client,
and a few counters of faults, which callers change directly.

A scrape returns the sums over all processes on the port. If there are several processes,
`gunicorn_conf` sets PROMETHEUS_MULTIPROC_DIR before this module is imported. prometheus_client then
keeps the values in files in that directory, and the scraped process reads the files of all.

The statistics of the engines come from their last heartbeats. Every gateway process exports the
same values. If a model has several engines, the values of each have the labels `role` and
`address`. If there are several models, the values of each have the label `model_name`, and so have
the sums over answers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from gateway.engine.client import ConnectedEngine
from gateway.generation.record import AnswerRecord, ChoiceRecord, RequestRecord
from gateway.observe.metric_specs import MODEL_LABEL, GatewaySeries, M, MetricSpec
from gateway.observe.vllm_names import aliased
from protocol.engine.messages import Limits, Times
from protocol.engine.stats import EngineStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
MULTIPROCESS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
STAGES = {
    "queue": "queued_s",
    "grammar": "grammar_s",
    "fetch": "fetching_s",
    "encode": "encoding_s",
    "prefill": "prefill_s",
    "decode": "decode_s",
    "preempted": "preempted_s",
}
"""Value of the label `stage` -> field of Times. The stage "tokenize" is not in Times, because the
engine does not measure it."""


class Metrics(GatewaySeries):
    """The gateway's metrics: counts requests and writes the body of `/metrics`.

    engines   returns the engines of each model, whose last statistics are exported
    models    main names of the models if there are several; otherwise empty
    """

    def __init__(
        self, engines: Callable[[], Sequence[ModelEngines]], models: Sequence[str] = ()
    ) -> None:
        super().__init__(CollectorRegistry(), models)
        self._list_engines = engines
        self._engines = EngineCollector(engines, names_models=bool(models))

    # ---- counting

    def count(self, record: RequestRecord) -> None:
        """Add a request that has ended. Call this once for each request."""
        self.requests.labels(record.route, str(record.status)).inc()
        if not record.is_probe:
            self.ends.labels(record.end).inc()
        if record.answer is None:
            return
        model = [record.model] if self._models else []
        _child(self.finishes, *model, record.answer.finish).inc()
        if record.answer.is_accepted:
            _child(self.request_s, *model, record.route).observe(record.took_s)
            self._count_answer(record.answer, model)

    def _count_answer(self, answer: AnswerRecord, model: Sequence[str]) -> None:
        """Add an accepted answer. `model` has the value of the label MODEL_LABEL, if any."""
        _child(self.prompt_tokens, *model).inc(answer.prompt_tokens)
        _child(self.cached_tokens, *model).inc(answer.cached_tokens)
        _child(self.generated_tokens, *model).inc(answer.generated_tokens)
        if answer.images:
            self._count_images(answer, model)
        _child(self.request_prompt_tokens, *model).observe(answer.prompt_tokens)
        _child(self.request_generated_tokens, *model).observe(answer.generated_tokens)
        _child(self.request_choices, *model).observe(len(answer.choices))
        if answer.first_token_s is not None:
            _child(self.first_token_s, *model).observe(answer.first_token_s)
        if answer.draft_tokens:
            share = answer.accepted_tokens / answer.draft_tokens
            _child(self.draft_acceptance, *model).observe(share)
        self._count_choices(answer.choices, model)
        self._count_times(answer, model)

    def _count_images(self, answer: AnswerRecord, model: Sequence[str]) -> None:
        _child(self.image_tokens, *model).inc(answer.image_tokens)
        _child(self.images, *model, "hit").inc(answer.cached_images)
        _child(self.images, *model, "miss").inc(answer.images - answer.cached_images)
        _child(self.image_s, *model, "fetch").inc(answer.image_fetch_s)
        _child(self.image_s, *model, "decode").inc(answer.image_decode_s)
        _child(self.image_s, *model, "preprocess").inc(answer.image_preprocess_s)

    def _count_choices(self, choices: Iterable[ChoiceRecord], model: Sequence[str]) -> None:
        for choice in choices:
            _child(self.choices, *model, choice.finish).inc()
            if choice.max_tokens is not None:
                _child(self.request_max_tokens, *model).observe(choice.max_tokens)
            if choice.times is not None and choice.generated_tokens > 1:
                gaps = choice.generated_tokens - 1
                _child(self.token_s, *model).observe(choice.times.decode_s / gaps)

    def _count_times(self, answer: AnswerRecord, model: Sequence[str]) -> None:
        _child(self.stage_s, *model, "tokenize").observe(answer.tokenize_s)
        if all(choice.times is None for choice in answer.choices):
            return  # the request ended before the engine reported any times
        times: Times = answer.times
        for stage, field in STAGES.items():
            _child(self.stage_s, *model, stage).observe(getattr(times, field))
        _child(self.inference_s, *model).observe(times.prefill_s + times.decode_s)

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
        model = next((each.model for each in self._list_engines()), "")
        exported.register(_Collected([*ours, *aliased(ours, model)]))
        return generate_latest(exported)


def _child(metric: M, *values: str) -> M:
    """Return the part of `metric` with these label values; `metric` itself if it has no labels."""
    return metric.labels(*values) if values else metric


class _Collected(Collector):
    """A collector that returns metrics that were collected before.

    Each metric is exported under its own name and under its aliases. Collecting the metrics only
    once saves time, because it reads the files of all processes.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


# ---- the engines


@dataclass(frozen=True, slots=True)
class ModelEngines:
    """The engines of one model."""

    #: Main name of the model; "" before it was reported.
    model: str
    #: Empty on a server without an engine.
    connections: Sequence[ConnectedEngine]


class EngineCollector(Collector):
    """Exports the last statistics of all engines.

    engines       returns the engines of each model
    names_models  whether the metrics have the label MODEL_LABEL
    """

    def __init__(
        self, engines: Callable[[], Sequence[ModelEngines]], *, names_models: bool = False
    ) -> None:
        self._list_engines = engines
        self._names_models = names_models

    def collect(self) -> Iterator[Metric]:
        found = [
            (each.model, connection)
            for each in self._list_engines()
            for connection in each.connections
        ]
        if not found:
            yield GaugeMetricFamily("tidegate_engine_up", _UP, value=0.0)
            return
        has_roles = any(connection.role for _, connection in found)
        names = [MODEL_LABEL] * self._names_models + ["role", "address"] * has_roles
        engines = []
        for model, connection in found:
            client = connection.client
            place = [connection.role, client.address] * has_roles
            engines.append(([model] * self._names_models + place, client))
        up = GaugeMetricFamily("tidegate_engine_up", _UP, labels=names)
        for values, client in engines:
            up.add_metric(values, float(client.is_ready))
        yield up
        told = [(values, client.stats, client.limits) for values, client in engines]
        yield from engine_metrics([(values, stats) for values, stats, _ in told if stats], names)
        known = [(v, stats, limits) for v, stats, limits in told if stats and limits]
        yield from cache_info(known, names)


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


def cache_info(
    engines: Sequence[tuple[list[str], EngineStats, Limits]], names: list[str]
) -> Iterator[Metric]:
    """Yield the metric that describes the KV cache of each engine in its labels.

    engines  (label values, statistics, limits) of each engine that has sent both
    names    names of the labels that all metrics have
    """
    if not engines:
        return
    info = GaugeMetricFamily(CACHE_INFO, _CACHE, labels=[*names, *CACHE_LABELS])
    for values, stats, limits in engines:
        window = limits.kv_window if limits.kv_groups is None else limits.kv_groups.window
        facts = (
            limits.block_tokens,
            limits.num_blocks,
            stats.kv_dtype,
            str(limits.prefix_cache).lower(),
            "" if window is None else window,
        )
        info.add_metric([*values, *map(str, facts)], 1.0)
    yield info


CACHE_INFO = "tidegate_engine_cache_info"
CACHE_LABELS = ("block_tokens", "num_blocks", "kv_dtype", "prefix_cache", "window")
_CACHE = "Always 1; the labels describe the KV cache of the engine"
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
    _gauge("total_checkpoints", "Checkpoints of recurrent states in total; 0: no such layers"),
    _gauge("cached_checkpoints", "Checkpoints of recurrent states that a prompt may find"),
    _gauge("held_checkpoints", "Checkpoints of recurrent states that running requests hold"),
    _gauge(
        "state_bytes",
        "Bytes of recurrent states in use: of running requests, and of checkpoints",
        "place",
    ),
    _gauge("reserved_state_bytes", "Bytes of recurrent states of all slots and checkpoints"),
    _gauge("clients", "Connected clients"),
    _gauge("fetching", "K/V fetches in progress"),
    _gauge("leases", "Prompts whose K/V is kept for other engines"),
    _gauge("leased_blocks", "KV blocks kept for other engines"),
    _gauge("max_adapters", "Most LoRA adapters that can be loaded"),
    _gauge("adapters_running", "Requests that hold a slot, by LoRA adapter", "adapter"),
    _gauge("adapters_waiting", "Requests waiting for a slot, by LoRA adapter", "adapter"),
    _gauge("tier_blocks", "KV blocks in the tier that can be loaded", "tier"),
    _gauge("tier_bytes", "Bytes stored in the tier", "tier"),
    _gauge("image_tokens", "Rows of encoded images that are kept, one for each token"),
    _gauge("image_bytes", "Bytes of the tensors of images that are kept"),
    _counter("steps", "Steps computed"),
    _counter("accepted", "Requests accepted"),
    _counter("adapter_requests", "Requests accepted, by loaded LoRA adapter", "adapter"),
    _counter("refused", "Requests refused"),
    _counter("refused_early", "Requests rejected by a gateway from a cached engine refusal"),
    _counter("prompt_tokens", "Prompt tokens of accepted requests"),
    _counter("cached_tokens", "Prompt tokens found in the prefix cache"),
    _counter(
        "uncovered_tokens",
        "Prompt tokens computed although their K/V was cached, because no checkpoint followed them",
    ),
    _counter(
        "evicted_checkpoints", "Cached checkpoints that were lost, by what was lacking", "lack"
    ),
    _counter("computed_tokens", "Positions computed, draft tokens included"),
    _counter("fetched_tokens", "Prompt tokens whose K/V was fetched from another engine"),
    _counter("fetched_bytes", "Bytes of K/V fetched from other engines"),
    _counter("generated_tokens", "Tokens sampled"),
    _counter("preemptions", "Preemptions: requests that gave up their slot and blocks"),
    _counter("draft_tokens", "Draft tokens verified"),
    _counter("accepted_tokens", "Draft tokens accepted"),
    _counter("images_encoded", "Images encoded"),
    _counter("image_tokens_encoded", "Tokens of encoded images"),
    _counter("image_hits", "Images of started requests that had been encoded before"),
    _counter("image_encode_seconds", "Time spent encoding images", field="image_encode_s"),
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
