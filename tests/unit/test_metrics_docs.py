"""docs/metrics.md names what `/metrics` tells, all of it and nothing else; so do deploy/ and its
dashboard."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
from prometheus_client.core import Metric

from gateway.observe.engine_metrics import engine_series
from gateway.observe.metric_specs import Series
from gateway.observe.metrics import Metrics
from gateway.observe.vllm_names import ALIASES, PREFIX, aliased
from protocol.stats import EngineStats

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (`tidegate_[^|]+)\|([^|]*)\|", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
SERIES = re.compile(r"(?:tidegate_|vllm:)[a-z0-9_]+[a-z0-9]")


def told_names(metrics: Iterable[Metric]) -> set[str]:
    """As they are asked for: counters end in _total, of a histogram the name alone."""
    return {f"{m.name}_total" if m.type == "counter" else m.name for m in metrics}


def every_name() -> set[str]:
    """All that a server can tell."""
    ours = Metrics(list)
    engine = list(engine_series([([], EngineStats(total_blocks=1))], []))
    sources = told_names([*ours._registry.collect(), *engine]) | {"tidegate_engine_up"}
    counters = {name.removesuffix("_total") for name in sources if name.endswith("_total")}
    aliases = {
        f"{PREFIX}{name}{'_total' if alias.source in counters else ''}"
        for alias in ALIASES
        for name in alias.names
    }
    return sources | aliases


def test_every_series_is_in_the_documentation_and_no_other() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert set(SERIES.findall(text)) == every_name()


def labels_of_series() -> dict[str, set[str]]:
    """Names as in the documentation -> labels."""
    labels = {"tidegate_engine_up": set[str]()}
    for _, told in map(get_args, get_type_hints(Series, include_extras=True).values()):
        labels[told.name] = set(told.labels)
    mappings: dict[str, Any] = {
        field.name: {"any": 1}
        for field in msgspec.structs.fields(EngineStats)
        if isinstance(getattr(EngineStats(), field.name), dict)
    }
    for metric in engine_series([([], EngineStats(**mappings))], []):
        (sample,) = [s for s in metric.samples if not s.name.endswith("_created")]
        labels[metric.name] = set(sample.labels)
    return labels


def test_every_series_has_the_labels_that_the_documentation_names() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    documented = {
        name.removesuffix("_total"): set(CODE.findall(labels))
        for names, labels in ROW.findall(text)
        for name in CODE.findall(names)
    }
    assert documented == labels_of_series()


def test_every_alias_has_a_source() -> None:
    ours = Metrics(list)
    engine = engine_series([([], EngineStats())], [])
    known = {metric.name for metric in [*ours._registry.collect(), *engine]}
    assert {alias.source for alias in ALIASES} <= known


def test_nothing_is_told_under_other_names_before_the_model_is_known() -> None:
    assert list(aliased(Metrics(list)._registry.collect(), "")) == []
