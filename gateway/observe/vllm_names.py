"""The names that dashboards, routers and autoscalers made for vLLM ask for: our series, said again.

Every alias is made of the samples of one of our own series when `/metrics` is read. So it costs
nothing while requests are answered and cannot say anything else. They are always there: who does
not ask for them loses some bytes per scrape, and who does needs no switch.

Each has `model_name`, the first served name, and `engine`, the place of the engine it is about;
what is summed over a gateway's requests is engine "0". The labels of ours that the other name does
not have are summed over.
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
    """names   without `vllm:`, and without the ending that the kind of series brings
    source  our series
    only    of this, the samples with these labels
    keeps   our label -> what they call it, and their values for those of ours that they call
            otherwise
    """

    names: Sequence[str]
    source: str
    only: Mapping[str, str] = {}
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
    """All that can be said of `ours`. model_name "": it is not known yet, and nothing can."""
    if not model_name:
        return
    known = {metric.name: metric for metric in ours}
    for alias in ALIASES:
        if (metric := known.get(alias.source)) is not None:
            for name in alias.names:
                yield renamed(metric, PREFIX + name, alias, {"model_name": model_name})


def renamed(metric: Metric, name: str, alias: Alias, more: Labels) -> Metric:
    """`metric` under another name, summed over the labels that the other has not."""
    engine = _numbering()
    sums: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for sample in metric.samples:
        if any(sample.labels.get(label) != value for label, value in alias.only.items()):
            continue
        if sample.name.endswith("_created"):
            continue
        labels = more | {"engine": engine(sample.labels)} | _kept(alias, sample)
        ending = sample.name.removeprefix(metric.name)
        sums[name + ending, tuple(labels.items())] += sample.value
    told = Metric(name, metric.documentation, metric.type)
    told.samples = [Sample(full, dict(labels), value) for (full, labels), value in sums.items()]
    return told


def _kept(alias: Alias, sample: Sample) -> Labels:
    kept = {"le": sample.labels["le"]} if "le" in sample.labels else {}
    for label, (name, values) in alias.keeps.items():
        kept[name] = values.get(sample.labels[label], sample.labels[label])
    return kept


def _numbering() -> Callable[[Labels], str]:
    """Engines are numbered as they come; without an address there is but one."""
    known: dict[str, int] = {}

    def number(labels: Labels) -> str:
        return str(known.setdefault(labels.get("address", ""), len(known)))

    return number
