"""vLLM's metric names, as aliases of our metrics, for dashboards, routers and autoscalers.

An alias is computed from the samples of one of our metrics when `/metrics` is read. So it costs
nothing per request and always agrees with its source. There is no option to omit the aliases,
because they only add some bytes to a scrape.

Each alias has the labels `model_name` (the model's main name) and `engine` (the index of the
engine among those of its model). Sums over a gateway's requests have the engine "0". If vLLM's
metric lacks one of our labels, the alias is the sum over the values of that label.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

PREFIX = "vllm:"
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
    Alias(["kv_cache_usage_perc", "gpu_cache_usage_perc"], "tidegate_engine_kv_usage_ratio"),
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
    """Yield all aliases of our metrics.

    model_name  value of the label `model_name` of samples that do not have this label themselves.
                Before a model was reported it is "", and there are no aliases
    """
    if not model_name:
        return
    by_name = {metric.name: metric for metric in ours}
    for alias in ALIASES:
        if (metric := by_name.get(alias.source)) is not None:
            for name in alias.names:
                yield renamed(metric, PREFIX + name, alias, {"model_name": model_name})


def renamed(metric: Metric, name: str, alias: Alias, extra: Labels) -> Metric:
    """Return `metric` under the name `name`, summed over the labels that `alias` does not keep.

    extra  labels that every sample gets, if it does not have them itself
    """
    engine = _engine_numbering()
    sums: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for sample in metric.samples:
        if any(sample.labels.get(label) != value for label, value in alias.only.items()):
            continue
        if sample.name.endswith("_created"):
            continue
        own = {name: sample.labels[name] for name in extra.keys() & sample.labels.keys()}
        labels = extra | own | {"engine": engine(sample.labels)} | _labels(alias, sample)
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


def _engine_numbering() -> Callable[[Labels], str]:
    """Return a function that maps the labels of a sample to the index of its engine.

    The engines of a model are numbered in the order in which their samples appear. If a sample has
    no label `address`, its model has only one engine.
    """
    models: defaultdict[str, dict[str, int]] = defaultdict(dict)

    def number(labels: Labels) -> str:
        indexes = models[labels.get("model_name", "")]
        return str(indexes.setdefault(labels.get("address", ""), len(indexes)))

    return number
