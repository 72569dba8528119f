"""vLLM's metric names for our metrics, for dashboards, routers and autoscalers.

A metric under vLLM's name is computed from the samples of our metrics when `/metrics` is read. So
it costs nothing per request and always agrees with its source. There is no option to omit these
metrics, because they only add some bytes to a scrape.

Endpoint pickers read one value of each metric from each server: the first sample, whatever its
labels are. So a metric under vLLM's name has one sample for all engines of a model, and no label
`engine`. If vLLM's metric lacks one of our labels, it is the sum over the values of that label. A
metric that cannot be added up, such as a ratio, is computed from sums.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from gateway.observe.metric_specs import MODEL_LABEL

PREFIX = "vllm:"
ENGINE_PREFIX = "tidegate_engine_"
"""First part of the names of all metrics of engines."""
Labels = dict[str, str]


class Alias(msgspec.Struct, frozen=True):
    """vLLM's names for one of our metrics."""

    #: vLLM's names without the prefix `vllm:` and without the suffix of the metric's type.
    names: Sequence[str]
    #: Name of our metric.
    source: str
    #: Label values that a sample must have to be included.
    only: Mapping[str, str] = {}
    #: Our label -> (vLLM's label, our value -> vLLM's value if it differs).
    keeps: Mapping[str, tuple[str, Mapping[str, str]]] = {}


_FINISH_REASONS = {
    "tool_calls": "stop",
    "disconnected": "abort",
    "cancelled": "abort",
}


def _stage(name: str, stage: str) -> Alias:
    return Alias([name], "tidegate_stage_seconds", only={"stage": stage})


ALIASES = (
    Alias(["num_requests_running"], "tidegate_engine_running"),
    Alias(["num_requests_waiting"], "tidegate_engine_waiting"),
    Alias(["num_preemptions"], "tidegate_engine_preemptions"),
    Alias(["prefix_cache_queries", "gpu_prefix_cache_queries"], "tidegate_engine_prompt_tokens"),
    Alias(["prefix_cache_hits", "gpu_prefix_cache_hits"], "tidegate_engine_cached_tokens"),
    Alias(["spec_decode_num_draft_tokens"], "tidegate_engine_draft_tokens"),
    Alias(["spec_decode_num_accepted_tokens"], "tidegate_engine_accepted_tokens"),
    Alias(["prompt_tokens"], "tidegate_prompt_tokens"),
    Alias(["prompt_tokens_cached"], "tidegate_cached_tokens"),
    Alias(["generation_tokens"], "tidegate_generated_tokens"),
    Alias(
        ["request_success"],
        "tidegate_choices",
        keeps={"finish": ("finished_reason", _FINISH_REASONS)},
    ),
    Alias(["time_to_first_token_seconds"], "tidegate_time_to_first_token_seconds"),
    Alias(
        [
            "request_time_per_output_token_seconds",
            "inter_token_latency_seconds",
            "time_per_output_token_seconds",
        ],
        "tidegate_time_per_output_token_seconds",
    ),
    Alias(["e2e_request_latency_seconds"], "tidegate_request_seconds"),
    _stage("request_queue_time_seconds", "queue"),
    _stage("request_prefill_time_seconds", "prefill"),
    _stage("request_decode_time_seconds", "decode"),
    Alias(["request_inference_time_seconds"], "tidegate_inference_seconds"),
    Alias(["request_prompt_tokens"], "tidegate_request_prompt_tokens"),
    Alias(["request_generation_tokens"], "tidegate_request_generated_tokens"),
    Alias(
        ["request_params_max_tokens", "request_max_num_generation_tokens"],
        "tidegate_request_max_tokens",
    ),
    Alias(["request_params_n"], "tidegate_request_choices"),
)


def aliased(ours: Iterable[Metric], model_name: str) -> Iterator[Metric]:
    """Yield all metrics under vLLM's names.

    model_name  value of the label `model_name` of samples that do not have this label themselves.
                Before a model was reported it is "", and there are no such metrics
    """
    if not model_name:
        return
    by_name = {metric.name: metric for metric in ours}
    for alias in ALIASES:
        if (metric := by_name.get(alias.source)) is not None:
            for name in alias.names:
                yield renamed(metric, PREFIX + name, alias, {MODEL_LABEL: model_name})
    models = _samples_by_model(by_name, model_name)
    for computed in COMPUTED:
        for name in computed.names:
            yield from computed.gauge(name, models)


def renamed(metric: Metric, name: str, alias: Alias, extra: Labels) -> Metric:
    """Return `metric` under the name `name`, summed over the labels that `alias` does not keep.

    extra  labels that every sample gets, if it does not have them itself
    """
    sums: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for sample in metric.samples:
        if any(sample.labels.get(label) != value for label, value in alias.only.items()):
            continue
        if sample.name.endswith("_created"):
            continue
        own = {name: sample.labels[name] for name in extra.keys() & sample.labels.keys()}
        labels = extra | own | _labels(alias, sample)
        suffix = sample.name.removeprefix(metric.name)
        sums[name + suffix, tuple(labels.items())] += sample.value
    found = Metric(name, metric.documentation, metric.type)
    found.samples = [Sample(full, dict(labels), value) for (full, labels), value in sums.items()]
    return found


def _labels(alias: Alias, sample: Sample) -> Labels:
    """Return the labels that the sample keeps, with vLLM's names and values."""
    labels = {"le": sample.labels["le"]} if "le" in sample.labels else {}
    for label, (name, values) in alias.keeps.items():
        labels[name] = values.get(sample.labels[label], sample.labels[label])
    return labels


# ---- metrics that are not sums of one of ours
EngineSamples = Mapping[str, Sequence[Sample]]
"""Name of a metric of engines -> its samples, of the engines of one model."""


def _samples_by_model(ours: Mapping[str, Metric], model_name: str) -> Mapping[str, EngineSamples]:
    """Return the samples of each model's engines. `model_name` is the model of samples without this
    label."""
    found: defaultdict[str, dict[str, list[Sample]]] = defaultdict(dict)
    for name, metric in ours.items():
        if name.startswith(ENGINE_PREFIX):
            for sample in metric.samples:
                model = found[sample.labels.get(MODEL_LABEL, model_name)]
                model.setdefault(name, []).append(sample)
    return found


class Computed(msgspec.Struct, frozen=True):
    """A gauge under vLLM's names with one sample for each model."""

    #: vLLM's names without the prefix `vllm:`.
    names: Sequence[str]
    help: str
    #: Returns labels and value of a model's sample. None: no engine of the model has reported yet.
    compute: Callable[[EngineSamples], tuple[Labels, float] | None]

    def gauge(self, name: str, models: Mapping[str, EngineSamples]) -> Iterator[Metric]:
        """Yield the gauge under one of its names, unless it has no samples."""
        found = [(model, self.compute(samples)) for model, samples in models.items()]
        samples = [
            Sample(PREFIX + name, {MODEL_LABEL: model, **sample[0]}, sample[1])
            for model, sample in found
            if sample is not None
        ]
        if samples:
            metric = Metric(PREFIX + name, self.help, "gauge")
            metric.samples = samples
            yield metric


def _kv_cache_usage(engines: EngineSamples) -> tuple[Labels, float] | None:
    """Return the share of all engines' KV blocks that requests or leases hold."""
    total = sum(each.value for each in engines.get("tidegate_engine_total_blocks", ()))
    free = sum(each.value for each in engines.get("tidegate_engine_free_blocks", ()))
    return ({}, (total - free) / total) if total else None


def _cache_config(engines: EngineSamples) -> tuple[Labels, float] | None:
    """Return the facts about the KV cache. `num_gpu_blocks` is the sum over all engines, and the
    others are those of the first engine: the engines of one model are configured alike."""
    infos = [sample.labels for sample in engines.get("tidegate_engine_cache_info", ())]
    if not infos:
        return None
    labels = {
        "block_size": infos[0]["block_tokens"],
        "num_gpu_blocks": str(sum(int(each["num_blocks"]) for each in infos)),
        "cache_dtype": infos[0]["kv_dtype"],
        "enable_prefix_caching": infos[0]["prefix_cache"].title(),
        "sliding_window": infos[0]["window"] or "None",
    }
    return labels, 1.0


def _lora_requests(engines: EngineSamples) -> tuple[Labels, float] | None:
    """Return which adapters have requests, and the time. Endpoint pickers read the newest sample,
    and log an error at each scrape if the metric is missing. On a server without adapters the time
    is 0, so the sample is never the newest."""
    if "tidegate_engine_running" not in engines:
        return None
    most = max((each.value for each in engines.get("tidegate_engine_max_adapters", ())), default=0)
    labels = {
        "max_lora": f"{most:.0f}",
        "running_lora_adapters": _adapters(engines, "tidegate_engine_adapters_running"),
        "waiting_lora_adapters": _adapters(engines, "tidegate_engine_adapters_waiting"),
    }
    return labels, time.time() if most else 0.0


def _adapters(engines: EngineSamples, name: str) -> str:
    """Return the names of the adapters that have a sample of this metric, separated by commas."""
    return ",".join(sorted({each.labels["adapter"] for each in engines.get(name, ())}))


COMPUTED = (
    Computed(
        ["kv_cache_usage_perc", "gpu_cache_usage_perc"],
        "Share of the KV blocks held by requests or leases, from 0 to 1",
        _kv_cache_usage,
    ),
    Computed(["cache_config_info"], "Always 1; the labels describe the KV cache", _cache_config),
    Computed(
        ["lora_requests_info"],
        "LoRA adapters with requests, in the labels; the value is the time",
        _lora_requests,
    ),
)
