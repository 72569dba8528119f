"""The text output of a benchmark: tables of figures and ratios, and warnings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tools.bench.stats import Spread, Summary

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table of figures."""

    name: str
    value: Callable[[Summary], float | None]
    #: None: the figure is not used to compare servers.
    lower_is_better: bool | None = None
    digits: int = 0

    def format(self, summary: Summary) -> str:
        value = self.value(summary)
        return NOTHING if value is None else f"{value:,.{self.digits}f}"


def _spread_metrics(name: str, value: Callable[[Summary], Spread | None]) -> list[Metric]:
    def at(share: str) -> Callable[[Summary], float | None]:
        return lambda summary: getattr(value(summary), share, None)

    return [Metric(f"{name}, {s}", at(s), True, 1) for s in ("p50", "p90", "p99")]


METRICS = [
    Metric("requests", lambda s: s.requests),
    Metric("errors", lambda s: s.requests - s.completed),
    Metric("seconds", lambda s: s.duration_s, None, 1),
    Metric("requests/s", lambda s: s.requests_per_s, False, 2),
    Metric("tokens/s in", lambda s: s.input_tokens_per_s, False, 0),
    Metric("tokens/s out", lambda s: s.output_tokens_per_s, False, 1),
    *_spread_metrics("time to first token, ms", lambda s: s.ttft_ms),
    *_spread_metrics("time per output token, ms", lambda s: s.tpot_ms),
    *_spread_metrics("between two events, ms", lambda s: s.gap_ms),
    *_spread_metrics("end to end, ms", lambda s: s.e2e_ms),
    Metric("within the objectives", lambda s: s.good),
    Metric("goodput, requests/s", lambda s: s.goodput_per_s, False, 2),
    Metric("prompt tokens from a cache", lambda s: s.cached_tokens or None),
    Metric("events/s", lambda s: s.events / s.duration_s if s.duration_s else None),
    Metric("client's own CPU, cores", lambda s: s.client_cpu, None, 2),
]


def table(summaries: Sequence[Summary]) -> list[list[str]]:
    """Return the table of one server: a row per metric that has a value, a column per load."""
    rows = [["", *(str(summary.load) for summary in summaries)]]
    for metric in METRICS:
        if any(metric.value(summary) is not None for summary in summaries):
            rows.append([metric.name, *map(metric.format, summaries)])
    return rows


def ratios(first: Sequence[Summary], other: Sequence[Summary]) -> list[list[str]]:
    """Return a table: the first server's figures divided by those of `other`, with a column per
    load."""
    rows = [["", *(str(summary.load) for summary in first)]]
    for metric in METRICS:
        if metric.lower_is_better is None:
            continue
        numbers = [ratio(metric, a, b) for a, b in zip(first, other, strict=True)]
        if any(value is not None for value in numbers):
            better = "less is better" if metric.lower_is_better else "more is better"
            values = (NOTHING if value is None else f"{value:.2f}" for value in numbers)
            rows.append([f"{metric.name} ({better})", *values])
    return rows


def ratio(metric: Metric, one: Summary, other: Summary) -> float | None:
    """Return the ratio of a metric's two values; None if one is missing or the second is 0."""
    a, b = metric.value(one), metric.value(other)
    return None if a is None or not b else a / b


def warnings(summary: Summary) -> list[str]:
    """Return the errors under one load, and the reasons why its figures may mislead, as text."""
    where = f"{summary.server}, {summary.load}"
    texts = [
        f"{where}: {count} x {kind}" + (f": {first}" if (first := summary.complaints[kind]) else "")
        for kind, count in summary.errors.items()
    ]
    if counted := summary.counted_by.get("chunks"):
        texts.append(
            f"{where}: the server did not report the token counts of {counted} answers; their "
            "events were counted instead, and their prompts were not counted"
        )
    if summary.resent:
        texts.append(
            f"{where}: {summary.resent} requests were sent again because the server closed a "
            "connection instead of answering"
        )
    if summary.short_answers:
        texts.append(f"{where}: {summary.short_answers} answers are shorter than requested")
    if summary.is_client_busy:
        texts.append(
            f"{where}: the client used {summary.client_cpu:.2f} CPU cores, so its times are not "
            "reliable; the server may be faster than shown"
        )
    return texts


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Return `rows` as a text table: the first column left-aligned, the others right-aligned."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *values in rows:
        cells = (value.rjust(width) for value, width in zip(values, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)
