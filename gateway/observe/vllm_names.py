"""vLLM's metric names, as aliases of our series, for dashboards, routers and autoscalers.

Every alias is computed from the samples of one of our series when `/metrics` is read. So it costs
nothing per request and always agrees with its source. The aliases are always exported: they need
no switch and cost some bytes per scrape.

Each alias has the labels `model_name`, the first served name, and `engine`, the index of its
engine. Sums over a gateway's requests have engine "0". Labels that vLLM's metric lacks are summed
over.
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
    """vLLM's names of one of our series."""

    #: Without the prefix `vllm:` and the suffix of the metric type.
    names: Sequence[str]
    #: Name of our series.
    source: str
    #: Labels that a sample must have to be included.
    only: Mapping[str, str] = {}
    #: Our label -> vLLM's label, and vLLM's values for those of ours that differ.
    keeps: Mapping[str, tuple[str, Mapping[str, str]]] = {}


_REASONS = {
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
    Alias(["request_success"], "tidegate_choices", keeps={"finish": ("finished_reason", _REASONS)}),
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
    """Yield all aliases of `ours`; none if `model_name` is "", which means not known yet."""
    if not model_name:
        return
    known = {metric.name: metric for metric in ours}
    for alias in ALIASES:
        if (metric := known.get(alias.source)) is not None:
            for name in alias.names:
                yield renamed(metric, PREFIX + name, alias, {"model_name": model_name})


def renamed(metric: Metric, name: str, alias: Alias, extra: Labels) -> Metric:
    """Return `metric` under another name, summed over the labels that the alias lacks."""
    engine = _engine_numbering()
    sums: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for sample in metric.samples:
        if any(sample.labels.get(label) != value for label, value in alias.only.items()):
            continue
        if sample.name.endswith("_created"):
            continue
        labels = extra | {"engine": engine(sample.labels)} | _labels(alias, sample)
        suffix = sample.name.removeprefix(metric.name)
        sums[name + suffix, tuple(labels.items())] += sample.value
    found = Metric(name, metric.documentation, metric.type)
    found.samples = [Sample(full, dict(labels), value) for (full, labels), value in sums.items()]
    return found


def _labels(alias: Alias, sample: Sample) -> Labels:
    labels = {"le": sample.labels["le"]} if "le" in sample.labels else {}
    for label, (name, values) in alias.keeps.items():
        labels[name] = values.get(sample.labels[label], sample.labels[label])
    return labels


def _engine_numbering() -> Callable[[Labels], str]:
    """Return a function from labels to an engine index, in order of first use.

    Samples without the label `address` belong to the only engine.
    """
    known: dict[str, int] = {}

    def number(labels: Labels) -> str:
        return str(known.setdefault(labels.get("address", ""), len(known)))

    return number
