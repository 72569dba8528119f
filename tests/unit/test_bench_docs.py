"""The output that docs/bench.md shows has the form it has. Its commands are checked by
test_docs_blocks.py."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from protocol.bench import PARTS
from tools.__main__ import build_parser
from tools.bench.config import BenchConfig
from tools.bench.report import METRICS
from tools.commands.bench import facts
from tools.flags import build

PAGE = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
COMMANDS = re.findall(r"^\$ tidegate (.*)$", PAGE, re.MULTILINE)


def test_there_are_examples_of_each() -> None:
    kinds = {re.match(r"bench step|bench|profile", command)[0] for command in COMMANDS}  # type: ignore[index]
    assert kinds == {"bench", "bench step", "profile"}


def test_the_output_shown_is_what_the_command_says_today() -> None:
    command, _, output = PAGE.partition("\n$ tidegate bench ")[2].partition("\n")
    output = output.partition("\n```")[0]
    options = vars(build_parser().parse_args(["bench", *shlex.split(command)]))
    config = build(BenchConfig, options, url=options["url"])
    first, *lines = output.splitlines()
    assert first == facts(config, 7)
    rows = {line.split("   ")[0].split(" (")[0].strip() for line in lines if "   " in line}
    assert rows - {""} <= {metric.name for metric in METRICS}
    assert len(rows) > 15


def test_the_parts_of_a_step_are_the_ones_there_are() -> None:
    (head,) = re.findall(r"^context +batch .*$", PAGE, re.MULTILINE)
    assert re.split(r"\s{2,}", head)[-len(PARTS) :] == list(PARTS)
