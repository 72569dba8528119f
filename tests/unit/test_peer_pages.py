"""The pages for users of other servers name only options, commands, routes, variables, metrics and
fields that Tidegate has."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

from gateway.api.llama_cpp.requests import LlamaCompletionBody
from gateway.api.openai.requests import ChatBody
from gateway.app import operations
from tests.support.processes import ROOT
from tools import other_servers
from tools.__main__ import COMMANDS, build_parser

PAGES = sorted((ROOT / "docs" / "start").glob("coming-from-*.md"))
ROUTES = {f"{op.method.upper()} {re.sub('<.*?>', 'ID', op.rule)}" for op in operations()}
FIELDS = {*ChatBody.__struct_fields__, *LlamaCompletionBody.__struct_fields__, "path"}
"""Fields of requests, and the key of a file of `--models` that is no option."""
VARIABLES = re.compile(r"`((?:TIDEGATE|HF)_\w+)`")
METRICS = (ROOT / "docs" / "operate" / "metrics.md").read_text()
"""tests/unit/test_metrics_docs.py compares this page with the metrics."""


def theirs(text: str) -> list[str]:
    """Return what the first column of a page's tables names: each option, route and command,
    without the words after it."""
    cells = re.findall(r"^\|([^|]*)\|[^|]*\|[^|]*\|$", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def ours(text: str) -> list[str]:
    """Return what the column "Tidegate" of a page's tables names."""
    rows = re.findall(r"^\|[^|]*\|([^|]*)\|[^|]*\|$", text, re.MULTILINE)
    return [name for cell in rows for name in re.findall(r"`([^`]+)`", cell)]


@cache
def options_of(command: str) -> set[str]:
    """Return the options that the help of a command lists; of `serve`, the help of all options."""
    names = [command, "--help", *(["all"] if command == "serve" else [])]
    with redirect_stdout(StringIO()) as output, pytest.raises(SystemExit):
        build_parser().parse_args(names)
    return set(re.findall(r"--[a-z][\w-]*", output.getvalue()))


def command_of(words: str) -> str:
    """Return the command that `words`, without "tidegate", begin with; "" if there is none."""
    return max(
        (name for name in COMMANDS if f"{words} ".startswith(f"{name} ")), key=len, default=""
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_calls_ours_exists(page: Path) -> None:
    names = ours(page.read_text())
    assert len(names) > 30
    variables = VARIABLES.findall((ROOT / "docs" / "operate" / "configuration.md").read_text())
    serve = options_of("serve")
    for name in names:
        if name.startswith("tidegate "):
            command = command_of(name.removeprefix("tidegate "))
            assert command, name
            assert set(re.findall(r"--[\w-]+", name)) <= options_of(command), name
        elif name.startswith("--"):
            assert name in serve, name
        elif re.match(r"[A-Z]+ /", name):
            assert name in ROUTES, name
        elif name.isupper():
            assert name in variables, name
        elif ":" in name:
            assert name in METRICS, name
        else:
            assert name in FIELDS or f"--{name.replace('_', '-')}" in serve, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_error_for_what_a_page_lists_names_the_replacement(page: Path) -> None:
    """A user who types an option or a command of the page, without reading it, gets its advice."""
    serve = options_of("serve")
    for name in theirs(page.read_text()):
        program, _, rest = name.partition(" ")
        if program.startswith("-"):
            assert program in other_servers.OPTIONS or program in serve, name
        elif program in ("ollama", "vllm"):
            assert command_of(rest) or rest.split()[0] in other_servers.COMMANDS, name
