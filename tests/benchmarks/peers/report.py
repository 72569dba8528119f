"""Prints the table of a comparison, with ratios, from a file with its measurements. With `--svg`,
also draws its picture.

    python -m tests.benchmarks.peers.report FIGURES.json [--svg FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from tests.benchmarks.peers.measure import Turns
from tests.benchmarks.peers.plan import OUTPUT_TOKENS, PREFIX
from tools.bench.page import PlotLine, Point, svg
from tools.bench.report import NOTHING, warnings
from tools.bench.stats import Summary, summarize

Value = Callable[[Summary], float | None]


class Figures(msgspec.Struct, frozen=True):
    """The figures of one server.

    ready_s   time from start to ready, once per round
    loads     results by name of the load
    """

    name: str
    ready_s: list[float]
    loads: dict[str, Summary]

    @classmethod
    def of(cls, name: str, turns: Turns) -> Figures:
        return cls(
            name,
            turns.ready_s,
            {
                load: summarize(name, config.loads[0], turns.runs[load], config)
                for load, config in turns.configs.items()
            },
        )


class Comparison(msgspec.Struct, frozen=True):
    """The figures of a comparison.

    setting   one line: the model, the machine and the number of rounds
    servers   the figures of each server, Tidegate's first
    """

    setting: str
    servers: list[Figures]


ROWS: list[tuple[str, Value]] = [
    ("tokens/s out", lambda s: s.output_tokens_per_s),
    ("time per token, p50, ms", lambda s: s.tpot_ms.p50 if s.tpot_ms else None),
    ("time to first token, p50, ms", lambda s: s.ttft_ms.p50 if s.ttft_ms else None),
    ("time to first token, p99, ms", lambda s: s.ttft_ms.p99 if s.ttft_ms else None),
]


def table(result: Comparison) -> str:
    """Return Markdown: a row per load and measure, then the ratios of the first server to each
    other one."""
    names = [server.name for server in result.servers]
    rows = [["", *names, *(f": {name}" for name in names[1:])]]
    rows.append(["---"] * len(rows[0]))
    loads = dict.fromkeys(load for server in result.servers for load in server.loads)
    for load in loads:
        for what, value in ROWS:
            of = [_value(server.loads.get(load), value) for server in result.servers]
            rows.append(_row(f"{load}: {what}", of, digits=1))
    ready = [min(server.ready_s) for server in result.servers]  # of a start with warm caches
    rows.append(_row("start to ready, best, s", ready, digits=1))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _value(summary: Summary | None, of: Value) -> float | None:
    return None if summary is None else of(summary)


def _row(name: str, values: Sequence[float | None], *, digits: int) -> list[str]:
    ours = values[0]
    ratios = [ours / value if ours and value else None for value in values[1:]]
    return [name, *(_format(v, digits) for v in values), *(_format(ratio, 2) for ratio in ratios)]


def _format(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}"


def picture(result: Comparison) -> str:
    """Return an SVG of the time of a whole answer against throughput, a curve per server."""
    lines = [
        PlotLine(server.name, points, colour)
        for colour, server in enumerate(result.servers)
        if (points := _curve(server))
    ]
    title = f"Latency against throughput, answers of {OUTPUT_TOKENS} tokens"
    return svg(title, "output tokens/s", "seconds per answer, p50", lines, logarithmic=True)


def _curve(server: Figures) -> list[Point]:
    return [
        Point(summary.output_tokens_per_s, summary.e2e_ms.p50 / 1e3, load)
        for load, summary in server.loads.items()
        if load != PREFIX and summary.e2e_ms is not None
    ]


def print_report(result: Comparison, svg_file: str) -> None:
    print(f"{result.setting}\n\n{table(result)}")
    for server in result.servers:
        for load, summary in server.loads.items():
            for line in warnings(summary):
                print(f"{load}: {line}")
    if svg_file:
        Path(svg_file).write_text(picture(result), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers.report")
    parser.add_argument("figures", type=Path, help="JSON that a comparison wrote")
    parser.add_argument(
        "--svg", default="", metavar="FILE", help="draw latency against throughput into FILE"
    )
    options = parser.parse_args()
    print_report(msgspec.json.decode(options.figures.read_bytes(), type=Comparison), options.svg)


if __name__ == "__main__":
    main()
