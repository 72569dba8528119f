"""The code blocks of README and docs, as far as they can be checked without a server.
tests/e2e/test_docs_blocks.py runs them."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from protocol.tools.bench import PARTS
from tests.support import docs_blocks
from tests.support.docs_blocks import (
    COMMANDS,
    LANGUAGES,
    PYTHON,
    SHELL,
    Block,
    all_blocks,
    blocks_of,
    commands_of,
)
from tools.__main__ import build_parser, with_command
from tools.bench.config import BenchConfig
from tools.bench.report import METRICS
from tools.commands.bench import facts
from tools.flags import build, take_late_argument

BLOCKS = all_blocks()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_code_block_names_its_language(block: Block) -> None:
    teaching = (
        f"{block}: name the block's language behind its ```: sh or console if it can be pasted "
        "into a shell, python, json, toml, yaml, or text for what is only shown"
    )
    assert block.language in LANGUAGES | {""}, teaching
    if not block.language:
        assert not block.text.startswith(COMMANDS), teaching
    if block.reason:
        assert block.language in {PYTHON, *SHELL}, f"{block}: only commands and Python are run"
        assert len(block.reason.split()) > 2, f"{block}: say why it cannot be run"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "json"], ids=str)
def test_a_block_of_json_is_json(block: Block) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "toml"], ids=str)
def test_a_block_of_toml_is_toml(block: Block) -> None:
    tomllib.loads(block.text)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == PYTHON], ids=str)
def test_a_block_of_python_is_python(block: Block) -> None:
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in SHELL], ids=str)
def test_a_command_of_ours_has_the_options_that_it_is_shown_with(block: Block) -> None:
    for command in commands_of(block.script):
        options, unknown = build_parser().parse_known_args(with_command(shlex.split(command)))
        assert callable(options.run)
        assert not unknown or take_late_argument(options, unknown), f"{block}: tidegate {command}"


def test_a_page_is_cut_into_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs_blocks, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n```console\n$ tidegate ps \\\n    --json\n{}\n"
        "a$ tidegate stop 'a>b' > c 2>&1 &  # b\n```\n\n"
        "<!-- not run: it never ends -->\n```sh\nmake serve\n```\n"
    )
    first, second = blocks_of(page)
    assert (str(first), first.language, first.reason) == ("page.md:4", "console", "")
    assert first.script == "tidegate ps \\\n    --json\ntidegate stop 'a>b' > c 2>&1 &  # b"
    assert list(commands_of(first.script)) == ["ps      --json", "stop 'a>b'"]
    assert (str(second), second.script, second.reason) == (
        "page.md:12",
        "make serve\n",
        "it never ends",
    )


# ---- the output that docs/operate/bench.md shows
PAGE = (Path(__file__).parents[2] / "docs" / "operate" / "bench.md").read_text()
BENCH_COMMANDS = re.findall(r"^\$ tidegate (.*)$", PAGE, re.MULTILINE)


def test_the_bench_page_has_an_example_of_each_command() -> None:
    kinds = {re.match(r"bench step|bench|profile", command)[0] for command in BENCH_COMMANDS}  # type: ignore[index]
    assert kinds == {"bench", "bench step", "profile"}


def test_the_shown_bench_output_has_todays_form() -> None:
    command, _, output = PAGE.partition("\n$ tidegate bench ")[2].partition("\n")
    output = output.partition("\n```")[0]
    options = vars(build_parser().parse_args(["bench", *shlex.split(command)]))
    config = build(BenchConfig, options, url=options["url"])
    first, *lines = output.splitlines()
    assert first == facts(config, 7)
    rows = {line.split("   ")[0].split(" (")[0].strip() for line in lines if "   " in line}
    assert rows - {""} <= {metric.name for metric in METRICS}
    assert len(rows) > 15


def test_the_shown_parts_of_a_step_are_the_current_ones() -> None:
    (head,) = re.findall(r"^context +batch .*$", PAGE, re.MULTILINE)
    assert re.split(r"\s{2,}", head)[-len(PARTS) :] == list(PARTS)
