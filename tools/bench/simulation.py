"""The text and HTML output of a simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from protocol.tools.simulation import LoadFigures, Quantiles, SimulationConfig, SimulationResult
from tools.bench.page import PlotLine, Point, document, html_table, svg
from tools.bench.report import NOTHING

MAX_POINTS = 120
"""Most points of a line in a plot."""


def result_table(result: SimulationResult) -> list[list[str]]:
    """Return the figures of a result: a column for all requests, and one for those that went to
    replicas with the real engine."""
    columns = [result.figures]
    heads = ["", "all replicas"]
    if result.exact_figures is not None and result.exact < result.replicas:
        columns.append(result.exact_figures)
        heads.append(f"the {result.exact} with the real engine")
    elif result.exact_figures is not None:
        heads = ["", "all replicas, with the real engine"]
    rows = [heads]
    for name, value in _METRICS:
        rows.append([name, *map(value, columns)])
    spare = [NOTHING] * (len(columns) - 1)
    if result.states is not None:
        again = _share(result.states.num_uncovered_tokens, result.figures.input_tokens)
        rows.append(["prompt tokens computed again", again, *spare])
        evicted = result.states.num_evicted
        rows += [
            ["checkpoints evicted by others", f"{evicted.get('checkpoints', 0):,}", *spare],
            ["checkpoints evicted with blocks", f"{evicted.get('blocks', 0):,}", *spare],
        ]
    routing, num = result.routing, max(result.figures.num_requests, 1)
    expected = routing.expected_tokens / max(result.figures.input_tokens, 1)
    rows += [
        ["busy", f"{result.busy:.0%}", *spare],
        ["busiest replica / average", f"{routing.imbalance:.2f}", *spare],
        ["cached as the routers expected", f"{expected:.1%}", *spare],
        ["prefixes in the routing tables", f"{routing.num_entries:,}", *spare],
        ["routing, CPU us per request", f"{routing.cpu_s / num * 1e6:.0f}", *spare],
        ["simulated in, s", f"{result.wall_s:.1f}", *spare],
    ]
    return rows


def search_table(results: Sequence[SimulationResult]) -> list[list[str]]:
    """Return a table of the search for the number of replicas: a heading, and a row for each number
    that was tried, in that order."""
    rows = [["replicas", "GPUs", "engine", "first token p50, ms", "p99", "refused", "busy", "met"]]
    for result in results:
        ttft = result.figures.ttft
        rows.append(
            [
                str(result.replicas),
                str(result.gpus),
                f"{result.exact} real" if result.exact else "light model",
                _ms(ttft, lambda q: q.p50),
                _ms(ttft, lambda q: q.p99),
                f"{result.figures.num_refused:,}",
                f"{result.busy:.0%}",
                "yes" if result.meets_target else "no",
            ]
        )
    return rows


def answer(results: Sequence[SimulationResult], config: SimulationConfig) -> str:
    """Return the result in one sentence."""
    last = results[-1]
    ttft = last.figures.ttft
    if ttft is None:
        return "no request was served"
    size = f"{last.gpus} GPUs ({last.replicas} replicas of {config.tensor_parallel})"
    if config.tensor_parallel == 1:
        size = f"{last.replicas} replica" + "s" * (last.replicas != 1)
    served = f"{size}: 99 % of the first tokens within {ttft.p99 * 1e3:,.0f} ms"
    if last.meets_target is None:
        return served
    target = f"{config.target_ttft_p99 * 1e3:,.0f} ms"
    if not last.meets_target:
        return f"{size} do not meet {target}: {ttft.p99 * 1e3:,.0f} ms at the 99th percentile"
    return f"{served}, which meets the target of {target}"


def page(machine: str, results: Sequence[SimulationResult], config: SimulationConfig) -> str:
    """Return an HTML page with plots and tables."""
    last = results[-1]
    plots = [*_plots_over_time(last)]
    tables = [result_table(last)]
    if config.target_ttft_p99:
        plots.insert(0, _search_plot(results, config))
        tables.insert(0, search_table(results))
    parts = [
        "<h1>Simulated cluster</h1>",
        f"<p>{escape(answer(results, config))}</p>",
        f"<pre>{escape(machine)}</pre>",
        '<div class="plots">' + "\n".join(plots) + "</div>",
        *map(html_table, tables),
    ]
    return document("Simulated cluster", parts)


def _plots_over_time(result: SimulationResult) -> list[str]:
    step = -(-len(result.seconds) // MAX_POINTS)
    seconds = result.seconds[::step]

    def line(name: str, values: Sequence[float], colour: int, *, dashed: bool = False) -> PlotLine:
        points = [Point(s.second, value, "") for s, value in zip(seconds, values, strict=True)]
        return PlotLine(name, points, colour, dashed)

    first = [
        line("p50", [s.ttft_p50 * 1e3 for s in seconds], 0),
        line("p99", [s.ttft_p99 * 1e3 for s in seconds], 0, dashed=True),
    ]
    requests = [
        line("running", [s.running for s in seconds], 2),
        line("waiting", [s.waiting for s in seconds], 1),
        line("refused per second", [s.num_refused for s in seconds], 5, dashed=True),
    ]
    return [
        svg("Time to first token, by time of arrival", "seconds", "milliseconds", first),
        svg("Requests in the cluster", "seconds", "requests", requests),
    ]


def _search_plot(results: Sequence[SimulationResult], config: SimulationConfig) -> str:
    tried = sorted(results, key=lambda result: result.replicas)
    points = [
        Point(result.replicas, result.figures.ttft.p99 * 1e3, str(result.replicas))
        for result in tried
        if result.figures.ttft is not None
    ]
    target = config.target_ttft_p99 * 1e3
    ends = [Point(tried[0].replicas, target, ""), Point(tried[-1].replicas, target, "")]
    lines = [PlotLine("p99", points, 0), PlotLine("target", ends, 1, dashed=True)]
    title = "Time to first token by number of replicas"
    return svg(title, "replicas", "milliseconds", lines, logarithmic=True)


def _ms(quantiles: Quantiles | None, value: Callable[[Quantiles], float]) -> str:
    return NOTHING if quantiles is None else f"{value(quantiles) * 1e3:,.1f}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else NOTHING


def _per_s(figures: LoadFigures, num: int) -> str:
    return f"{num / figures.duration_s:,.1f}" if figures.duration_s else NOTHING


def _quantile_rows(
    name: str, quantiles: Callable[[LoadFigures], Quantiles | None]
) -> list[tuple[str, Callable[[LoadFigures], str]]]:
    return [
        (f"{name}, p50", lambda f: _ms(quantiles(f), lambda q: q.p50)),
        (f"{name}, p90", lambda f: _ms(quantiles(f), lambda q: q.p90)),
        (f"{name}, p99", lambda f: _ms(quantiles(f), lambda q: q.p99)),
    ]


_METRICS: list[tuple[str, Callable[[LoadFigures], str]]] = [
    ("requests", lambda f: f"{f.num_requests:,}"),
    ("refused", lambda f: f"{f.num_refused:,}"),
    ("refused from a gateway's cache", lambda f: f"{f.num_refused_early:,}"),
    ("preemptions", lambda f: f"{f.num_preemptions:,}"),
    ("seconds", lambda f: f"{f.duration_s:,.1f}"),
    ("requests/s", lambda f: _per_s(f, f.num_completed)),
    ("tokens/s in", lambda f: _per_s(f, f.input_tokens)),
    ("tokens/s out", lambda f: _per_s(f, f.output_tokens)),
    ("prompt tokens from the cache", lambda f: _share(f.cached_tokens, f.input_tokens)),
    *_quantile_rows("time to first token, ms", lambda f: f.ttft),
    *_quantile_rows("time per output token, ms", lambda f: f.tpot),
    *_quantile_rows("between two tokens, ms", lambda f: f.gap),
    *_quantile_rows("end to end, ms", lambda f: f.e2e),
    (
        "within the objectives",
        lambda f: NOTHING if f.num_good is None else _share(f.num_good, f.num_requests),
    ),
]
