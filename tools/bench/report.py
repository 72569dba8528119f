"""What a person reads: a table per server, a column per load; ratios; what is to be distrusted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tools.bench.stats import Spread, Summary

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Metric:
    """A row. lower_is_better None: no ratio is made of it."""

    name: str
    of: Callable[[Summary], float | None]
    lower_is_better: bool | None = None
    digits: int = 0

    def told(self, summary: Summary) -> str:
        value = self.of(summary)
        return NOTHING if value is None else f"{value:,.{self.digits}f}"


def _spread(name: str, of: Callable[[Summary], Spread | None]) -> list[Metric]:
    def at(share: str) -> Callable[[Summary], float | None]:
        return lambda summary: getattr(of(summary), share, None)

    return [Metric(f"{name}, {s}", at(s), True, 1) for s in ("p50", "p90", "p99")]


METRICS = [
    Metric("requests", lambda s: s.requests),
    Metric("errors", lambda s: s.requests - s.completed),
    Metric("seconds", lambda s: s.duration_s, None, 1),
    Metric("requests/s", lambda s: s.requests_per_s, False, 2),
    Metric("tokens/s in", lambda s: s.input_tokens_per_s, False, 0),
    Metric("tokens/s out", lambda s: s.output_tokens_per_s, False, 1),
    *_spread("time to first token, ms", lambda s: s.ttft_ms),
    *_spread("time per output token, ms", lambda s: s.tpot_ms),
    *_spread("between two events, ms", lambda s: s.gap_ms),
    *_spread("end to end, ms", lambda s: s.e2e_ms),
    Metric("within the objectives", lambda s: s.good),
    Metric("goodput, requests/s", lambda s: s.goodput_per_s, False, 2),
    Metric("prompt tokens from a cache", lambda s: s.cached_tokens or None),
    Metric("events/s", lambda s: s.events / s.duration_s if s.duration_s else None),
    Metric("client's own CPU, cores", lambda s: s.client_cpu, None, 2),
]


def shown(summaries: Sequence[Summary]) -> list[Metric]:
    """Those that somebody has a value for."""
    return [metric for metric in METRICS if any(metric.of(s) is not None for s in summaries)]


def table(summaries: Sequence[Summary]) -> str:
    """Of one server."""
    rows = [["", *(str(summary.load) for summary in summaries)]]
    for metric in shown(summaries):
        rows.append([metric.name, *(metric.told(summary) for summary in summaries)])
    return aligned(rows)


def ratios(first: Sequence[Summary], other: Sequence[Summary]) -> str:
    """Of the first server's figures to another's, load by load."""
    rows = [["", *(str(summary.load) for summary in first)]]
    for metric in METRICS:
        if metric.lower_is_better is None:
            continue
        told = [ratio(metric, a, b) for a, b in zip(first, other, strict=True)]
        if any(value is not None for value in told):
            better = "less is better" if metric.lower_is_better else "more is better"
            values = (NOTHING if value is None else f"{value:.2f}" for value in told)
            rows.append([f"{metric.name} ({better})", *values])
    return aligned(rows)


def ratio(metric: Metric, one: Summary, other: Summary) -> float | None:
    a, b = metric.of(one), metric.of(other)
    return None if a is None or not b else a / b


def warnings(summary: Summary) -> list[str]:
    """What a reader of the figures has to know about them."""
    where = f"{summary.server}, {summary.load}"
    told = [
        f"{where}: {count} x {kind}" + (f": {words}" if (words := summary.complaints[kind]) else "")
        for kind, count in summary.errors.items()
    ]
    if counted := summary.counted_by.get("chunks"):
        told.append(
            f"{where}: the server did not say how many tokens {counted} answers have; their events "
            "were counted instead, and no tokens of prompts"
        )
    if summary.resent:
        told.append(
            f"{where}: {summary.resent} requests were sent again, since the server closed a "
            "connection instead of answering"
        )
    if summary.short_answers:
        told.append(
            f"{where}: {summary.short_answers} answers ended before the length that was asked for"
        )
    if summary.is_client_busy:
        told.append(
            f"{where}: the client itself kept {summary.client_cpu:.2f} cores busy; its times are "
            "not to be trusted, and the server may be faster than this"
        )
    return told


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *values in rows:
        cells = (value.rjust(width) for value, width in zip(values, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)
