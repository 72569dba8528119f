"""Every command and every Python block of README and docs must work when it is pasted.

The blocks of a page run in order, in one folder, against a real server with the default model. The
line above a block that cannot be run gives the reason: see tests/support/docs_blocks.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.docs_blocks import (
    FIRST_TEN_MINUTES,
    PAGES,
    PYTHON,
    ROOT,
    SHELL,
    Block,
    blocks_of,
)
from tests.support.server import Server

pytestmark = pytest.mark.long

RUN_S = 300.0
"""Time limit of a block of commands, and of the Python blocks of a page together."""
SHIMS = {
    "tidegate": 'exec {python} -P -m tools "$@"',
    "python": 'exec {python} "$@"',
    "curl": 'exec {curl} --fail-with-body --dump-header headers "$@"',
}
"""Shell scripts that replace the commands on the pages. The one for curl fails if the answer is an
error."""
PROGRAM = """\
import sys
names = {"__name__": "__main__"}
for path, line in zip(sys.argv[1::2], map(int, sys.argv[2::2])):
    page, text = path.split("=", 1)
    code = "\\n" * (line - 1) + open(text).read()
    exec(compile(code, page, "exec"), names)
"""
"""Runs the Python blocks of a page as one program, whose traceback names the page and its line."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        runtime = tmp_path_factory.mktemp("r", numbered=False)
        runtime.chmod(0o700)
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))  # it is the only server that runs "here"
        with Server(model="smollm2-135m") as server:
            yield server


@pytest.fixture(scope="module")
def shims(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bin")
    curl = subprocess.run(["which", "curl"], capture_output=True, text=True).stdout.strip()
    if not curl:
        pytest.skip("needs curl")
    for name, line in SHIMS.items():
        (folder / name).write_text("#!/bin/sh\n" + line.format(python=sys.executable, curl=curl))
        (folder / name).chmod(0o755)
    return folder


def addressed(text: str, server: Server) -> str:
    """Return the text with our server instead of the default one, and without .venv/bin/."""
    text = re.sub(r"\b(?:127\.0\.0\.1|localhost):8000\b", f"127.0.0.1:{server.port}", text)
    return text.replace("Client()", f"Client({server.address!r})").replace(".venv/bin/", "")


def run(command: Sequence[str], folder: Path, shims: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(shims), os.environ["PATH"]])
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )


def check_shell(block: Block, server: Server, folder: Path, shims: Path) -> None:
    """Run a block of commands. Raise AssertionError, with its output, if the block fails or prints
    an error event, or if its last curl sent a field without effect."""
    (folder / "headers").unlink(missing_ok=True)
    command = ["bash", "-euo", "pipefail", "-c", addressed(block.script, server)]
    done = run(command, folder, shims)
    result = f"{block} fails when it is pasted:\n{block.text}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, result
    assert not re.search(r'^(event: error|data: \{"error")', done.stdout, re.MULTILINE), result
    headers = folder / "headers"
    ignored = "x-ignored-fields" in headers.read_text().lower() if headers.exists() else False
    assert not ignored, f"{block} has a field without effect:\n{headers.read_text()}"


def check_python(blocks: Sequence[Block], server: Server, folder: Path, shims: Path) -> None:
    """Run a page's Python blocks as one program. Raise AssertionError, with its output, if it
    fails."""
    arguments = []
    for number, block in enumerate(blocks):
        text = folder / f"{number}.txt"
        text.write_text(addressed(block.text, server), encoding="utf-8")
        arguments += [f"{block.page.relative_to(ROOT)}={text}", str(block.line)]
    done = run([sys.executable, "-c", PROGRAM, *arguments], folder, shims)
    assert done.returncode == 0, f"{blocks[0].page.name}:\n{done.stdout}\n{done.stderr}"


SERVED_PAGES = [page for page in PAGES if page != FIRST_TEN_MINUTES]


def runnable(page: Path) -> list[Block]:
    kinds = {*SHELL, PYTHON}
    return [b for b in blocks_of(page) if b.language in kinds and not b.reason]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page", [page for page in SERVED_PAGES if runnable(page)], ids=lambda page: page.stem
)
def test_code_shown_on_a_page_works_when_pasted(
    page: Path, server: Server, shims: Path, tmp_path: Path
) -> None:
    blocks = runnable(page)
    for block in blocks:
        if block.language != PYTHON:
            check_shell(block, server, tmp_path, shims)
    if program := [block for block in blocks if block.language == PYTHON]:
        check_python(program, server, tmp_path, shims)
