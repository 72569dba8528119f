"""An HTML page with the plots, tables and warnings of a benchmark. It loads nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from tools.bench.plot import PlotLine, Point, svg
from tools.bench.report import METRICS, NOTHING, ratio, warnings, with_values
from tools.bench.stats import Spread, Summary

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1360px; margin: 2em auto; padding: 0 1em;
       color: #1c1f23; }
.plots { display: flex; flex-wrap: wrap; gap: 16px; }
.plots svg { width: 640px; max-width: 100%; border: 1px solid #ddd; border-radius: 6px; }
table { border-collapse: collapse; margin: 0.5em 0 1.5em; font-variant-numeric: tabular-nums; }
th, td { padding: 2px 14px 2px 0; text-align: right; border-bottom: 1px solid #eee; }
th:first-child, td:first-child { text-align: left; }
.warning { color: #9a3412; }
"""


def page(title: str, facts: str, servers: Sequence[Sequence[Summary]]) -> str:
    """Return the page.

    servers   the summaries of each server, one per load
    """
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(facts)}</p>", plots(servers)]
    texts = [text for summaries in servers for summary in summaries for text in warnings(summary)]
    parts += [f'<p class="warning">{escape(text)}</p>' for text in texts]
    for summaries in servers:
        parts += [f"<h2>{escape(summaries[0].server)}</h2>", _table(summaries)]
    for other in servers[1:]:
        heading = f"{servers[0][0].server} : {other[0].server}"
        parts += [f"<h2>{escape(heading)}</h2>", _ratios(servers[0], other)]
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>'
        f"\n<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</html>\n"
    )


def plots(servers: Sequence[Sequence[Summary]]) -> str:
    """Plot latency against throughput: time to first token, and time per output token."""
    metrics = (
        ("Time to first token", lambda summary: summary.ttft_ms),
        ("Time per output token", lambda summary: summary.tpot_ms),
    )
    drawn = [
        svg(title, "output tokens/s", "milliseconds", _lines(servers, value))
        for title, value in metrics
    ]
    return '<div class="plots">' + "\n".join(drawn) + "</div>"


def _lines(
    servers: Sequence[Sequence[Summary]], value: Callable[[Summary], Spread | None]
) -> list[PlotLine]:
    lines = []
    for colour, summaries in enumerate(servers):
        for share, dashed in (("p50", False), ("p99", True)):
            points = [
                Point(summary.output_tokens_per_s, getattr(spread, share), str(summary.load))
                for summary in summaries
                if (spread := value(summary)) is not None
            ]
            lines.append(PlotLine(f"{summaries[0].server}, {share}", points, colour, dashed))
    return lines


def _table(summaries: Sequence[Summary]) -> str:
    rows = [[metric.name, *map(metric.format, summaries)] for metric in with_values(summaries)]
    return _html_table([str(summary.load) for summary in summaries], rows)


def _ratios(first: Sequence[Summary], other: Sequence[Summary]) -> str:
    rows = []
    for metric in METRICS:
        if metric.lower_is_better is not None:
            numbers = [ratio(metric, a, b) for a, b in zip(first, other, strict=True)]
            values = (NOTHING if value is None else f"{value:.2f}" for value in numbers)
            rows.append([metric.name, *values])
    return _html_table([str(summary.load) for summary in first], rows)


def _html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "\n".join(
        ["<table>", line(["", *heads], "th"), *(line(row, "td") for row in rows), "</table>"]
    )
