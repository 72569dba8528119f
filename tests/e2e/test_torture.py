"""Kills and stops processes of a server: some cells of tests/torture/signals.py, and a kill storm.

`make torture` runs all cells and a storm of ten thousand requests. The cells that a server survives
share one server.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks.memory_slope import measure
from tests.benchmarks.small_requests import FINISHED, LEFT, REFUSED
from tests.support.tiny_checkpoint import FITTING, write_babbling_llama, write_roomy_llama
from tests.torture.failover import failover_rows, split_rows
from tests.torture.kill_storm import ABORTED, FAILED, end_of_stream, storm
from tests.torture.signals import (
    CELLS,
    DECODE,
    ENGINE,
    GATEWAY,
    IDLE,
    KILL,
    MASTER,
    PREFILL,
    PREFILLER,
    SPLIT,
    SPLIT_RESTARTS,
    START,
    STOP,
    SUPERVISOR,
    WORKER,
    Cell,
    TortureRow,
    TortureScene,
    fate_of,
)
from tests.torture.templates import TemplateTarget

pytestmark = pytest.mark.long

SLACK = 5.0
"""Factor for all time limits, because the test machine may be busy. `make torture` uses 1."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_roomy_llama(tmp_path_factory.mktemp("tiny"))


def test_a_killed_process_is_reported_and_leaves_nothing_behind(model: Path) -> None:
    cells = [
        Cell(GATEWAY, IDLE, KILL),
        Cell(ENGINE, PREFILL, KILL),
        Cell(WORKER, DECODE, STOP),
        Cell(SUPERVISOR, DECODE, KILL),
    ]
    rows: list[TortureRow] = []
    with TortureScene(model) as scene:
        for cell in cells:
            rows.append(scene.strike(cell))
            assert not rows[-1].complaints(SLACK), f"{rows}\n{scene.output}"
        scene.stop(rows[-1])
        assert not rows[-1].complaints(SLACK), f"{rows}\n{scene.output}"


def test_a_request_during_the_engines_death_ends_once_and_is_counted_once(model: Path) -> None:
    weather, found = storm(model, num_requests=200, num_kills=1)
    assert not found
    assert weather.tally.ends[FINISHED] >= 50
    assert weather.tally.ends[FAILED] >= 1
    assert weather.tally.ends[ABORTED] >= 1


def test_other_clients_are_served_during_a_hostile_template(tmp_path: Path) -> None:
    with TemplateTarget(tmp_path) as target:
        for name in ("text of doubled lists", "each letter replaced", "deep loops"):
            assert not target.strike(name, at_once=2).complaints(slack=None)


def test_memory_is_measured_while_small_requests_end_well(model: Path) -> None:
    family, load = measure(model, num_requests=150, num_clients=4)
    assert not load.wrong
    assert load.ends.total() == 150
    assert min(load.ends[end] for end in (FINISHED, REFUSED, LEFT)) > 0
    names = ["supervisor", "gunicorn master", "gateway process", "templates", "engine", "worker"]
    assert sorted(process.name for process in family) == sorted(names)
    assert all(memory.rss > memory.own > 0 for each in family for _, memory in each.samples)


@pytest.mark.parametrize(
    ("kind", "cells"),
    [
        (SPLIT_RESTARTS, [(MASTER, DECODE, KILL), (PREFILLER, DECODE, KILL)]),
        (SPLIT, [(PREFILLER, PREFILL, KILL)]),
    ],
)
def test_every_stream_of_a_split_ends_with_an_answer_or_an_error_and_done(
    model: Path, kind: str, cells: list[tuple[str, str, signal.Signals]]
) -> None:
    rows: list[TortureRow] = []
    with TortureScene(model, kind) as scene:
        for cell in cells:
            rows.append(scene.strike(Cell(*cell, kind)))
            assert not rows[-1].complaints(SLACK), f"{rows}\n{scene.output}"
        scene.stop(rows[-1])
        assert not rows[-1].complaints(SLACK), f"{rows}\n{scene.output}"


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [b"data: [DONE]"],
        [b'data: {"choices": [{"finish_reason": "stop"}]}'],
        [b'data: {"error": {}}', b'data: {"error": {}}', b"data: [DONE]"],
        [b'data: {"error": {}}', b"data: [DONE]", b'data: {"error": {}}'],
    ],
)
def test_a_stream_without_exactly_one_end_is_an_error(lines: list[bytes]) -> None:
    with pytest.raises(ValueError, match="end"):
        end_of_stream(lines)


def test_every_cell_has_an_expected_result_that_is_checked() -> None:
    for cell in CELLS:
        fate = fate_of(cell)
        ends = [] if cell.moment in (START, IDLE) else ["error: the worker was killed"] * 2
        well = TortureRow(
            cell, ends=ends, end_s=0.5, unready_s=0.5, again_s=None if fate.codes else 2.0
        )
        well.code = min(fate.codes, default=None)
        assert well.complaints() == []
        assert replace(well, orphans=[7]).complaints() == ["left behind: [7]"]
        assert replace(well, code=77, again_s=None).complaints()
        if fate.is_unready:
            assert replace(well, unready_s=2.5).complaints() == ["unready after 2.50"]
            assert replace(well, unready_s=2.5).complaints(slack=2) == []
        if ends:
            assert replace(well, ends=[*ends, ""]).complaints() == ["an open stream never ended"]
            broken = replace(well, ends=[*ends, "broken: reset"])
            assert bool(broken.complaints()) != fate.breaks
        if ends and fate.is_error:
            assert replace(well, ends=["finished"]).complaints()
            assert replace(well, end_s=5.5).complaints()


def test_only_the_death_of_the_gateway_process_may_break_streams_off() -> None:
    breaks = {(cell.victim, cell.signal) for cell in CELLS if fate_of(cell).breaks}
    assert breaks == {(GATEWAY, KILL), (GATEWAY, STOP)}


def test_streams_of_a_killed_replica_end_as_they_would_have_alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = write_babbling_llama(tmp_path_factory.mktemp("babbling"), **FITTING)
    ways = ("kill engine", "kill worker")
    for row in failover_rows(folder, "auto", ways, runs=1, streams=24, seed=3):
        assert not row.complaints(SLACK), row


def test_streams_of_a_killed_decode_engine_end_as_they_would_have_alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = write_babbling_llama(tmp_path_factory.mktemp("babbling"), **FITTING)
    for row in split_rows(folder, "auto", ("kill decode",), runs=1, streams=24, seed=3):
        assert not row.complaints(SLACK), row
