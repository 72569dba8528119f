"""The comparison with other servers: whose turn it is, what is asked of whom, what is told."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from array import array

import msgspec
import pytest

from tests.benchmarks.peers.measure import Turns
from tests.benchmarks.peers.plan import PREFIX, Pace, loads, turns
from tests.benchmarks.peers.report import Comparison, Figures, picture, table
from tools.bench.answers import BenchAnswer, BenchUsage
from tools.bench.stats import BenchRun


def shown(token_s: float, ready_s: float, *, streams: tuple[int, ...] = (1, 8)) -> Turns:
    """Two rounds of a server that takes `token_s` for each of 5 tokens, the first included."""
    configs = loads(streams, Pace(1))
    times = [token_s * n for n in range(1, 6)]
    answer = BenchAnswer(0.0, 5, times[-1], array("d", times), usage=BenchUsage(10, 5))
    run = BenchRun([answer], 0.0, times[-1], 0.0)
    return Turns([ready_s, 3 * ready_s], {name: [run, run] for name in configs}, configs)


@pytest.fixture
def comparison() -> Comparison:
    ours, theirs = shown(0.01, 2.0), shown(0.04, 50.0)
    only_prefix = shown(0.02, 2.0, streams=())
    return Comparison(
        "on a machine",
        [Figures.of(n, t) for n, t in (("ours", ours), ("plain", only_prefix), ("other", theirs))],
    )


def test_the_order_of_the_servers_turns_about() -> None:
    assert turns("abc", 3) == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]


def test_every_point_of_the_curve_is_a_load_of_its_own_and_the_shared_beginning_is_another() -> (
    None
):
    asked = loads((1, 8), Pace(2))
    assert list(asked) == ["1 stream", "8 streams", PREFIX]
    assert [config.num_requests(config.loads[0]) for config in asked.values()] == [6, 16, 32]
    assert [config.dataset for config in asked.values()] == ["random", "random", "shared-prefix"]


def test_ratios_are_of_the_first_server_to_each_other_one(comparison: Comparison) -> None:
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table(comparison).split("\n")
    ]
    head, _, *lines = rows
    assert head == ["", "ours", "plain", "other", ": plain", ": other"]
    told = {line[0]: line[1:] for line in lines}
    assert told["8 streams: tokens/s out"] == ["100.0", "-", "25.0", "-", "4.00"]
    assert told["1 stream: time to first token, p50, ms"] == ["10.0", "-", "40.0", "-", "0.25"]
    assert told[f"{PREFIX}: time per token, p50, ms"] == ["10.0", "20.0", "40.0", "0.50", "0.25"]
    assert told["start to ready, best, s"] == ["2.0", "2.0", "50.0", "1.00", "0.04"]


def test_the_picture_has_a_curve_for_each_server_that_has_one(comparison: Comparison) -> None:
    drawn = ET.fromstring(picture(comparison))
    assert len(drawn.findall("{*}polyline")) == 2
    texts = {text.text for text in drawn.findall("{*}text")}
    assert {"ours", "other", "8 streams"} <= texts
    assert "plain" not in texts


def test_figures_survive_their_file(comparison: Comparison) -> None:
    assert msgspec.json.decode(msgspec.json.encode(comparison), type=Comparison) == comparison
