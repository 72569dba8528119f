"""The commands of docs/bench.md are taken as they stand, and its output has the form it has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from protocol.bench import PARTS, StepBench
from protocol.config.worker import WorkerConfig
from tools.__main__ import _commands, parser
from tools.bench.command import facts
from tools.bench.config import BenchConfig
from tools.bench.report import METRICS
from tools.flags import build

PAGE = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
COMMANDS = re.findall(r"^\$ tidegate (.*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_taken_as_it_stands(command: str) -> None:
    options = vars(parser().parse_args(_commands(shlex.split(command))))
    if command.startswith("bench step"):
        assert build(StepBench, options, worker=WorkerConfig(model="m")).batch
    elif command.startswith("bench"):
        assert build(BenchConfig, options, url=options["url"]).loads
    else:
        assert options["steps"] == 20


def test_there_are_examples_of_each() -> None:
    kinds = {re.match(r"bench step|bench|profile", command)[0] for command in COMMANDS}  # type: ignore[index]
    assert kinds == {"bench", "bench step", "profile"}


def test_the_output_shown_is_what_the_command_says_today() -> None:
    command, _, output = PAGE.partition("\n$ tidegate bench ")[2].partition("\n")
    output = output.partition("\n```")[0]
    options = vars(parser().parse_args(["bench", *shlex.split(command)]))
    config = build(BenchConfig, options, url=options["url"])
    first, *lines = output.splitlines()
    assert first == facts(config, 7)
    rows = {line.split("   ")[0].split(" (")[0].strip() for line in lines if "   " in line}
    assert rows - {""} <= {metric.name for metric in METRICS}
    assert len(rows) > 15


def test_the_parts_of_a_step_are_the_ones_there_are() -> None:
    (head,) = re.findall(r"^context +batch .*$", PAGE, re.MULTILINE)
    assert re.split(r"\s{2,}", head)[-len(PARTS) :] == list(PARTS)
