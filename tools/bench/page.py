"""Writes an HTML page with the plots, tables and warnings of a benchmark.

The page loads no other files and runs no script. Plots are SVG. Their axes start at zero, except a
logarithmic vertical axis, which can show values of very different sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol

from tools.bench.report import ratios, table, warnings
from tools.bench.stats import Spread, Summary

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 40, 56
COLOURS = ("#0b6bcb", "#d1495b", "#2e8b57", "#8a5cd1", "#c77d0a", "#4d5763")
MAX_TICKS = 6
LABEL_WIDTH = 60
LEGEND_ROW = 18
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
    """Return the HTML page of a benchmark.

    facts     describes the benchmark in one line
    servers   the summaries of each server, one per load
    """
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(facts)}</p>", plots(servers)]
    texts = [text for summaries in servers for summary in summaries for text in warnings(summary)]
    parts += [f'<p class="warning">{escape(text)}</p>' for text in texts]
    for summaries in servers:
        parts += [f"<h2>{escape(summaries[0].server)}</h2>", html_table(table(summaries))]
    for other in servers[1:]:
        heading = f"{servers[0][0].server} : {other[0].server}"
        parts += [f"<h2>{escape(heading)}</h2>", html_table(ratios(servers[0], other))]
    return document(title, parts)


def document(title: str, parts: Sequence[str]) -> str:
    """Return an HTML page with these parts."""
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>'
        f"\n<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</html>\n"
    )


def plots(servers: Sequence[Sequence[Summary]]) -> str:
    """Return two plots: time to first token, and time per output token, against throughput."""
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


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table, whose first row is its head."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    heads, *others = rows
    return "\n".join(
        ["<table>", line(heads, "th"), *(line(row, "td") for row in others), "</table>"]
    )


# ---- plots


@dataclass(frozen=True, slots=True)
class Point:
    """A measured point of a line."""

    x: float
    y: float
    label: str


@dataclass(frozen=True, slots=True)
class PlotLine:
    """A line of a plot: its name in the legend, its points and its style."""

    name: str
    points: Sequence[Point]
    #: Index into COLOURS.
    colour: int
    #: Distinguishes the line from another one of the same colour.
    dashed: bool = False


class Scale(Protocol):
    """An axis of a plot: the interface of `Axis` and `Decades`."""

    @property
    def ticks(self) -> list[float]: ...

    def share(self, value: float) -> float:
        """Return the position of `value` on the axis, from 0 to 1."""
        ...


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis from 0 to `top`, with a tick every `step`. Both numbers are round."""

    top: float
    step: float

    @property
    def ticks(self) -> list[float]:
        return [self.step * number for number in range(round(self.top / self.step) + 1)]

    def share(self, value: float) -> float:
        return value / self.top


@dataclass(frozen=True, slots=True)
class Decades:
    """A logarithmic axis whose ticks are 1, 2 or 5 times powers of ten."""

    ticks: list[float]

    def share(self, value: float) -> float:
        bottom, top = self.ticks[0], self.ticks[-1]
        return math.log(value / bottom) / math.log(top / bottom)


def axis(largest: float) -> Axis:
    """Return the shortest linear axis for values up to `largest`. It has at most MAX_TICKS steps. A
    step is 1, 2 or 5 times a power of ten."""
    if not largest > 0 or not math.isfinite(largest):
        return Axis(1.0, 0.5)
    magnitude = 10.0 ** math.floor(math.log10(largest / MAX_TICKS))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude * MAX_TICKS >= largest)
    return Axis(step * math.ceil(largest / step), step)


def decades(values: Sequence[float]) -> Decades:
    """Return the shortest logarithmic axis for all `values`, which must be above 0."""
    low, high = min(values, default=1.0), max(values, default=1.0)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    first = max(index for index, step in enumerate(steps) if step <= low)
    last = min(index for index, step in enumerate(steps) if step >= high)
    return Decades(steps[first : max(last, first + 1) + 1])


def svg(
    title: str, x_name: str, y_name: str, lines: Sequence[PlotLine], *, logarithmic: bool = False
) -> str:
    """Return a plot of `lines` as SVG.

    logarithmic   whether the vertical axis is logarithmic
    """
    points = [point for line in lines for point in line.points]
    across = axis(max((point.x for point in points), default=0))
    heights = [point.y for point in points]
    up: Scale = decades(heights) if logarithmic else axis(max(heights, default=0))
    height = HEIGHT + LEGEND_ROW * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="{escape(title)}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        _text(LEFT, 20, title, "start", 'font-weight="bold" font-size="14"'),
        *_grid(across, up),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, x_name, "middle"),
        f'<g transform="rotate(-90 16 {(TOP + HEIGHT - BOTTOM) / 2:.1f})">'
        + _text(16, (TOP + HEIGHT - BOTTOM) / 2, y_name, "middle")
        + "</g>",
    ]
    for line in lines:
        parts += _line(line, across, up)
    parts += _legend(lines)
    return "\n".join([*parts, "</svg>"])


def _grid(across: Scale, up: Scale) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    drawn = []
    for tick in across.ticks:
        x = _x(tick, across)
        drawn.append(_stroke(x, TOP, x, bottom))
        drawn.append(_text(x, bottom + 18, number(tick), "middle", 'fill="#555"'))
    for tick in up.ticks:
        y = _y(tick, up)
        drawn.append(_stroke(LEFT, y, right, y))
        drawn.append(_text(LEFT - 8, y + 4, number(tick), "end", 'fill="#555"'))
    return drawn


def _line(line: PlotLine, across: Scale, up: Scale) -> list[str]:
    colour = COLOURS[line.colour % len(COLOURS)]
    places = [(_x(point.x, across), _y(point.y, up)) for point in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    drawn = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
    for (x, y), point in zip(places, line.points, strict=True):
        tooltip = escape(f"{line.name}, {point.label}: {number(point.x)}, {number(point.y)}")
        drawn.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">'
            f"<title>{tooltip}</title></circle>"
        )
        if not line.dashed:
            anchor = "end" if x > WIDTH - RIGHT - LABEL_WIDTH else "middle"
            drawn.append(_text(x, y - 8, point.label, anchor, f'fill="{colour}" font-size="11"'))
    return drawn


def _legend(lines: Sequence[PlotLine]) -> list[str]:
    """Return the SVG of the legend. It is below the plot, where it cannot cover a line."""
    drawn = []
    for row, line in enumerate(lines):
        y, colour = HEIGHT + LEGEND_ROW * row + LEGEND_ROW // 2, COLOURS[line.colour % len(COLOURS)]
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        drawn.append(
            f'<line x1="{LEFT + 10}" y1="{y - 4}" x2="{LEFT + 34}" y2="{y - 4}" stroke="{colour}" '
            f'stroke-width="2"{dash}/>'
        )
        drawn.append(_text(LEFT + 40, y, line.name, "start"))
    return drawn


def _x(value: float, across: Scale) -> float:
    return LEFT + across.share(value) * (WIDTH - LEFT - RIGHT)


def _y(value: float, up: Scale) -> float:
    return HEIGHT - BOTTOM - up.share(value) * (HEIGHT - TOP - BOTTOM)


def _stroke(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#e3e3e3"/>'


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{escape(text)}</text>'


def number(value: float) -> str:
    """Return `value` as text with about three significant digits."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
