"""The pure parts of the benchmark: requests, their times, and the figures of their answers."""

from __future__ import annotations

import itertools
import json
import random
import xml.etree.ElementTree as ET
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tools.bench import datasets
from tools.bench.answers import BenchAnswer, BenchUsage
from tools.bench.config import BenchConfig, BenchLoad, run_order
from tools.bench.load import arrivals, body_of
from tools.bench.page import PlotLine, Point, axis, decades, page, svg
from tools.bench.report import METRICS, aligned, ratios, table, warnings
from tools.bench.stats import BenchRun, Summary, percentile, spread, summarize
from tools.failure import Failure


def config(**fields: Any) -> BenchConfig:
    return msgspec.convert(fields, BenchConfig)


def answer(*times: float, started: float = 0.0, error: str = "", tokens: int = 0) -> BenchAnswer:
    usage = BenchUsage(prompt_tokens=10, completion_tokens=tokens) if tokens else None
    return BenchAnswer(
        started=started,
        requested_tokens=tokens or len(times),
        ended=times[-1] if times else started,
        times=array("d", times),
        error=error,
        usage=usage,
    )


def summary(*answers: BenchAnswer, load: int = 1, seconds: float = 2.0, **fields: Any) -> Summary:
    run = BenchRun(list(answers), began=5.0, ended=5.0 + seconds, cpu_s=0.1)
    return summarize("http://here", BenchLoad(concurrency=load), [run], config(**fields))


# ---- figures
def test_a_percentile_is_an_observed_value() -> None:
    values = [float(n) for n in range(1, 11)]
    assert [percentile(values, share) for share in (1, 10, 50, 90, 91, 99, 100)] == [
        1.0,
        1.0,
        5.0,
        9.0,
        10.0,
        10.0,
        10.0,
    ]
    assert percentile([3.0], 50) == 3.0


def test_the_spread_of_no_values_is_none_and_not_zero() -> None:
    assert spread([]) is None
    some = spread([0.002, 0.001])
    assert (some.mean, some.p50, some.p99, some.max) == (1.5, 1.0, 2.0, 2.0)


def test_figures_are_those_of_the_answers() -> None:
    figures = summary(
        answer(1.0, 1.5, 2.0, tokens=5), answer(0.5, 0.6, started=0.2, tokens=3), seconds=4.0
    )
    assert (figures.requests, figures.completed, figures.errors) == (2, 2, {})
    assert (figures.input_tokens, figures.output_tokens) == (20, 8)
    assert (figures.requests_per_s, figures.output_tokens_per_s) == (0.5, 2.0)
    assert figures.ttft_ms.max == pytest.approx(1000)
    assert figures.tpot_ms.max == pytest.approx(250)  # a second for four tokens
    assert figures.tpot_ms.p50 == pytest.approx(50)
    assert figures.gap_ms.mean == pytest.approx((500 + 500 + 100) / 3)
    assert figures.e2e_ms.p50 == pytest.approx(400)
    assert figures.counted_by == {"usage": 2}
    assert figures.client_cpu == pytest.approx(0.025)


def test_failed_requests_are_counted_by_kind_and_are_in_no_other_figure() -> None:
    broken = answer(1.0, 2.0, error="broken stream", tokens=50)
    broken.message = "first"
    later = answer(error="broken stream")
    later.message = "second"
    figures = summary(answer(1.0, tokens=4), broken, later, answer(error="status 429"))
    assert figures.errors == {"broken stream": 2, "status 429": 1}
    assert figures.complaints["broken stream"] == "first"
    assert (figures.requests, figures.completed, figures.output_tokens) == (4, 1, 4)
    lines = warnings(figures)
    assert any("2 x broken stream: first" in line for line in lines)
    assert any(line.endswith("1 x status 429") for line in lines)


def test_runs_of_the_same_load_are_summarised_together() -> None:
    runs = [
        BenchRun([answer(1.0, tokens=2)], 0.0, 1.0, 0.5),
        BenchRun([answer(3.0, tokens=4)], 7.0, 10.0, 0.5),
    ]
    figures = summarize("x", BenchLoad(concurrency=1), runs, config())
    assert (figures.duration_s, figures.output_tokens_per_s, figures.client_cpu) == (4.0, 1.5, 0.25)


@pytest.mark.parametrize(
    ("ttft_ms", "tpot_ms", "good"),
    [(0, 0, None), (600, 0, 2), (0, 150, 2), (1100, 150, 2), (1, 1, 0)],
)
def test_goodput_counts_answers_within_all_objectives(
    ttft_ms: float, tpot_ms: float, good: int | None
) -> None:
    answers = [answer(0.5, 0.6, tokens=2), answer(1.0, 1.1, tokens=2), answer(0.1, 0.9, tokens=2)]
    answers.append(answer(0.1, error="status 500"))
    figures = summary(*answers, slo_ttft_ms=ttft_ms, slo_tpot_ms=tpot_ms)
    assert figures.good == good
    assert figures.goodput_per_s == (None if good is None else good / 2.0)


def test_a_summary_warns_of_figures_that_cannot_be_trusted() -> None:
    uncounted = answer(1.0, 2.0)
    short = answer(1.0, tokens=3)
    short.requested_tokens = 4
    run = BenchRun([uncounted, short], 0.0, 1.0, cpu_s=0.9)
    figures = warnings(summarize("http://here", BenchLoad(concurrency=2), [run], config()))
    assert [
        ("did not report" in line, "shorter than requested" in line, "CPU cores" in line)
        for line in figures
    ] == [(True, False, False), (False, True, False), (False, False, True)]
    assert all(line.startswith("http://here, 2 streams: ") for line in figures)


def test_the_table_has_a_column_for_each_load_and_no_empty_row() -> None:
    cells = table([summary(answer(1.0, 2.0, tokens=9)), summary(answer(error="x"), load=8)])
    figures = aligned(cells)
    head, *rows = figures.splitlines()
    assert head.split() == ["1", "stream", "8", "streams"]
    (ttft,) = [row for row in rows if row.startswith("time to first token, ms, p50")]
    assert ttft.split()[-2:] == ["1,000.0", "-"]
    assert "objectives" not in figures
    assert len({len(row) for row in rows}) == 1


def test_ratios_are_of_the_first_server_to_the_other() -> None:
    fast, slow = summary(answer(1.0, 2.0, tokens=9)), summary(answer(2.0, 6.0, tokens=3))
    rows = {
        line.split(" (")[0]: line.split()[-1]
        for line in aligned(ratios([fast], [slow])).splitlines()
    }
    assert rows["time to first token, ms, p50"] == "0.50"
    assert rows["tokens/s out"] == "3.00"
    assert "errors" not in rows


def test_metrics_have_names_of_their_own() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)


# ---- what is asked
@pytest.mark.parametrize("dataset", ["random", "shared-prefix"])
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_prompts_depend_on_the_seed_and_the_run(dataset: str, api: str) -> None:
    wanted = config(dataset=dataset, api=api, input_tokens=20, prefix_tokens=30, spread=0.5)

    def first(seed: int, number: int) -> list[datasets.BenchPrompt]:
        return list(itertools.islice(datasets.prompts(wanted, seed, number), 5))

    assert first(1, 0) == first(1, 0)
    assert first(1, 0) != first(1, 1)
    assert first(1, 0) != first(2, 0)


def test_random_prompts_have_the_requested_length_within_the_spread() -> None:
    exact = config(input_tokens=20, output_tokens=9, vocabulary=100)
    for ask in itertools.islice(datasets.prompts(exact, 1, 0), 20):
        assert isinstance(ask.prompt, list)
        assert (len(ask.prompt), ask.output_tokens) == (20, 9)
        assert all(5 <= token < 100 for token in ask.prompt)
    varied = itertools.islice(datasets.prompts(config(input_tokens=20, spread=0.5), 1, 0), 200)
    lengths = {len(ask.prompt or "") for ask in varied}
    assert (min(lengths), max(lengths)) == (10, 30)


def test_requests_share_the_requested_number_of_prefixes_in_every_run() -> None:
    wanted = config(dataset="shared-prefix", prefix_tokens=30, prefixes=3, input_tokens=5)
    beginnings = set()
    for number in (0, 1):
        for ask in itertools.islice(datasets.prompts(wanted, 1, number), 40):
            assert isinstance(ask.prompt, list)
            assert len(ask.prompt) == 35
            beginnings.add(tuple(ask.prompt[:30]))
    assert len(beginnings) == 3
    probe = datasets.probe(wanted, 1).prompt
    assert isinstance(probe, list)
    assert not any(tuple(probe[:4]) == beginning[:4] for beginning in beginnings)


def test_chat_prompts_are_words() -> None:
    (chat,) = itertools.islice(datasets.prompts(config(api="chat", input_tokens=6), 1, 0), 1)
    assert chat.messages is not None
    assert len(chat.messages[0]["content"].split()) == 6
    (text,) = itertools.islice(datasets.prompts(config(prompt_as="words", input_tokens=6), 1, 0), 1)
    assert isinstance(text.prompt, str)


def write(folder: Path, *lines: Any) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return str(path)


def test_a_file_may_hold_prompts_messages_and_sharegpt_conversations(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    file = write(
        tmp_path,
        {"prompt": "One", "max_tokens": 3},
        "",
        {"messages": [{"role": "user", "content": "Two"}]},
        {"conversations": talk, "id": "x"},
    )
    wanted = config(dataset="file", file=file, api="chat", output_tokens=7)
    found = list(itertools.islice(datasets.prompts(wanted, 1, 0), 4))
    assert [ask.messages[0]["content"] for ask in found if ask.messages] == [
        "One",
        "Two",
        "Hi",
        "One",
    ]
    assert [ask.output_tokens for ask in found] == [3, 7, 7, 3]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: "),
        ({"prompt": "a", "messages": []}, "line 2: must have exactly one"),
        ({"prompt": 3}, "line 2: .*prompt"),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            "line 2: a conversation requires --api chat",
        ),
        ({"conversations": [{"from": "gpt", "value": "a"}]}, "line 2: .*does not start"),
    ],
)
def test_an_invalid_line_of_a_prompt_file_is_named(tmp_path: Path, line: Any, words: str) -> None:
    file = write(tmp_path, {"prompt": "a"}, line)
    with pytest.raises(Failure, match=words):
        datasets.prompts(config(dataset="file", file=file), 1, 0)


def test_a_body_requests_an_exact_length_and_usage_if_supported() -> None:
    ask = datasets.BenchPrompt(prompt=[1, 2], output_tokens=5)
    body = body_of(ask, config(), "m", frozenset(("ignore_eos", "stream_options")))
    assert body == {
        "model": "m",
        "max_tokens": 5,
        "temperature": 0.0,
        "stream": True,
        "prompt": [1, 2],
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert "ignore_eos" not in body_of(ask, config(), "m", frozenset(("stream_options",)))
    assert "ignore_eos" not in body_of(
        ask, config(ignore_eos="no"), "m", frozenset(("ignore_eos",))
    )


# ---- when
def test_arrivals_have_the_requested_rate_and_depend_only_on_the_seed() -> None:
    def first(seed: int) -> list[float]:
        return list(itertools.islice(arrivals(20.0, random.Random(seed)), 4000))

    due = first(1)
    assert due == first(1) != first(2)
    assert due == sorted(due)
    assert due[-1] == pytest.approx(200, rel=0.05)
    gaps = sorted(b - a for a, b in itertools.pairwise(due))
    assert gaps[len(gaps) // 2] == pytest.approx(0.6931 / 20, rel=0.1)  # exponential: ln 2 / rate


def test_servers_take_turns_and_the_first_one_alternates() -> None:
    wanted = config(concurrency=[1, 8], vs=["http://b"], rounds=2)
    assert list(run_order(wanted)) == [
        (0, 0, [0, 1]),
        (0, 1, [1, 0]),
        (1, 0, [0, 1]),
        (1, 1, [1, 0]),
    ]


@pytest.mark.parametrize(
    ("fields", "loads", "requests"),
    [
        ({}, ["8 streams"], [32]),
        ({"concurrency": [1, 32]}, ["1 stream", "32 streams"], [16, 128]),
        ({"rate": [0.5, 4], "concurrency": [3]}, ["0.5/s, at most 3", "4/s, at most 3"], [16, 120]),
        ({"requests": 5}, ["8 streams"], [5]),
        ({"duration_s": 5}, ["8 streams"], [None]),
    ],
)
def test_each_load_has_its_number_of_requests(
    fields: dict[str, Any], loads: list[str], requests: list[int | None]
) -> None:
    wanted = config(**fields)
    assert [str(load) for load in wanted.loads] == loads
    assert [wanted.num_requests(load) for load in wanted.loads] == requests


@pytest.mark.parametrize(
    "fields",
    [
        {"dataset": "file"},
        {"file": "x"},
        {"requests": 1, "duration_s": 1},
        {"rate": [1], "concurrency": [1, 2]},
        {"rate": [0]},
        {"concurrency": [0]},
        {"api": "chat", "prompt_as": "ids"},
        {"header": ["Authorization"]},
        {"header": ["A: b\r\nC: d"]},
    ],
)
def test_contradictory_benchmark_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        config(**fields)


# ---- pictures
@pytest.mark.parametrize(
    ("largest", "top", "ticks"),
    [(0, 1.0, 3), (1, 1.0, 6), (7, 8.0, 5), (61, 80.0, 5), (120, 120.0, 7), (0.003, 0.003, 7)],
)
def test_an_axis_ends_at_a_round_number_that_is_not_below(
    largest: float, top: float, ticks: int
) -> None:
    made = axis(largest)
    assert made.top == pytest.approx(top)
    assert len(made.ticks) == ticks


def test_a_plot_is_xml_whose_points_lie_where_their_values_are() -> None:
    points = [Point(0, 0, "a"), Point(100, 50, "b & c"), Point(50, 25, "d")]
    drawn = ET.fromstring(svg("T<1>", "x", "y", [PlotLine("one", points, 0)]))
    circles = drawn.findall("{*}circle")
    places = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in circles]
    assert places[2][0] == pytest.approx((places[0][0] + places[1][0]) / 2)
    assert places[2][1] == pytest.approx((places[0][1] + places[1][1]) / 2)
    assert places[1][1] < places[0][1]
    assert "b & c" in [text.text for text in drawn.findall("{*}text")]


@pytest.mark.parametrize(
    ("values", "ticks"),
    [([3, 40], [2, 5, 10, 20, 50]), ([1], [1, 2]), ([0.02, 0.1], [0.02, 0.05, 0.1]), ([], [1, 2])],
)
def test_decades_hold_all_values_and_no_more(values: list[float], ticks: list[float]) -> None:
    assert decades(values).ticks == ticks


def test_equal_ratios_are_equal_distances_on_a_logarithmic_axis() -> None:
    made = decades([1, 100])
    assert [made.share(value) for value in (1, 10, 100)] == [0, pytest.approx(0.5), 1]


def test_the_page_loads_no_other_file_and_shows_all_errors() -> None:
    good, bad = summary(answer(1.0, 2.0, tokens=9)), summary(answer(error="status <500>"), load=8)
    figures = page("Title", "facts", [[good, bad], [bad, good]])
    assert figures.count("<svg") == 2
    assert "1 x status &lt;500&gt;" in figures
    assert "<script" not in figures
    assert "src=" not in figures
    assert "http://www.w3.org" in figures
    assert not {"<link", "@import", "url("} & set(figures.split())
