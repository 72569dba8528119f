"""docs/operate/metrics.md names every metric in `/metrics` and no other, each with its labels."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.core import Metric

from gateway.observe.metrics import Metrics, cache_info, engine_metrics
from gateway.observe.vllm_names import ALIASES, COMPUTED, PREFIX, aliased
from protocol.engine.messages import Limits
from protocol.engine.stats import EngineStats

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (`tidegate_[^|]+)\|([^|]*)\|", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
SERIES = re.compile(r"(?:tidegate_|vllm:)[a-z0-9_]+[a-z0-9]")


LIMITS = Limits(
    max_len=64, max_slots=2, block_tokens=16, num_blocks=9, token_budget=32, prefix_cache=True
)
ONLY_SOME = {"request_success": {"finished_reason"}} | {
    "cache_config_info": {
        "block_size",
        "num_gpu_blocks",
        "cache_dtype",
        "enable_prefix_caching",
        "sliding_window",
    },
    "lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
}
"""Name under vLLM's names -> labels that only this metric has."""


def of_one_engine(stats: EngineStats) -> list[Metric]:
    """Return the metrics of a server's only engine, as of its heartbeat `stats`."""
    return [*engine_metrics([([], stats)], []), *cache_info([([], stats, LIMITS)], [])]


def told_names(metrics: Iterable[Metric]) -> set[str]:
    """Return the names of the metrics as the documentation spells them: counters end in _total, and
    histograms have no suffix."""
    return {f"{m.name}_total" if m.type == "counter" else m.name for m in metrics}


def every_name() -> set[str]:
    """Return the name of every metric that a server can export."""
    ours = Metrics(list)
    engine = of_one_engine(EngineStats(total_blocks=1))
    sources = told_names([*ours.registry.collect(), *engine]) | {"tidegate_engine_up"}
    counters = {name.removesuffix("_total") for name in sources if name.endswith("_total")}
    aliases = {
        f"{PREFIX}{name}{'_total' if alias.source in counters else ''}"
        for alias in ALIASES
        for name in alias.names
    }
    return sources | aliases | {PREFIX + name for each in COMPUTED for name in each.names}


def test_every_series_is_in_the_documentation_and_no_other() -> None:
    text = (ROOT / "docs" / "operate" / "metrics.md").read_text()
    assert set(SERIES.findall(text)) == every_name()


def labels_of_series() -> dict[str, set[str]]:
    """Return the labels of each metric, by its name without `_total`."""
    labels = {"tidegate_engine_up": set[str]()}
    for spec in Metrics(list).specs:
        labels[spec.name] = set(spec.labels)
    mappings: dict[str, Any] = {
        field.name: {"any": 1}
        for field in msgspec.structs.fields(EngineStats)
        if isinstance(getattr(EngineStats(), field.name), dict)
    }
    for metric in of_one_engine(EngineStats(**mappings)):
        (sample,) = [s for s in metric.samples if not s.name.endswith("_created")]
        labels[metric.name] = set(sample.labels)
    return labels


def test_every_series_has_the_labels_that_the_documentation_names() -> None:
    text = (ROOT / "docs" / "operate" / "metrics.md").read_text()
    documented = {
        name.removesuffix("_total"): set(CODE.findall(labels))
        for names, labels in ROW.findall(text)
        for name in CODE.findall(names)
    }
    assert documented == labels_of_series()


def test_every_alias_has_the_labels_that_the_documentation_names() -> None:
    text = (ROOT / "docs" / "operate" / "metrics.md").read_text()
    section = text.partition("### Under vLLM's names")[2].partition("\n#")[0]
    shared = CODE.findall(section.partition("The series have the label ")[2].partition(" (")[0])
    assert shared == ["model_name"]
    ours = Metrics(list)
    ours.choices.labels("stop").inc()
    ours.request_s.labels("/v1/completions").observe(1)
    for stage in ("queue", "prefill", "decode"):
        ours.stage_s.labels(stage).observe(1)
    engine = of_one_engine(EngineStats(total_blocks=1))
    for metric in aliased([*ours.registry.collect(), *engine], "small"):
        labels = set().union(*(sample.labels for sample in metric.samples)) - {"le"}
        assert metric.samples, metric.name
        own = ONLY_SOME.get(metric.name.removeprefix(PREFIX), set())
        assert labels == {*shared, *own}, metric.name
        assert own <= set(CODE.findall(section))


def test_every_alias_has_a_source() -> None:
    ours = Metrics(list)
    engine = of_one_engine(EngineStats())
    known = {metric.name for metric in [*ours.registry.collect(), *engine]}
    assert {alias.source for alias in ALIASES} <= known


def test_there_are_no_aliases_before_the_model_is_known() -> None:
    assert list(aliased(Metrics(list).registry.collect(), "")) == []
