"""Pages can be read and pasted: their commands work with an old curl and show what comes back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.docs_blocks import PAGES, ROOT, SHELL, blocks_of

DOCS = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
ADDRESS = "http://127.0.0.1:8000"
"""The server's address, written the same on all pages."""
NEW_CURL = r"--(?:json|fail-with-body|retry-all-errors|url-query|variable|expand-\w+)\b"
"""Options that curl 7.68 lacks, which Ubuntu 20.04 has."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def curl_commands(page: Path) -> list[str]:
    """Return the lines of the page's shell blocks that run curl. Continued lines are joined."""
    scripts = [block.script for block in blocks_of(page) if block.language in SHELL]
    lines = [line for text in scripts for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if re.search(r"\bcurl ", line)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_curl_commands_work_with_an_old_curl_and_name_one_address(page: Path) -> None:
    for command in curl_commands(page):
        assert not re.search(NEW_CURL, command), f"{name_of(page)}: {command}"
        assert ADDRESS in command, f"{name_of(page)}: {command}"
    assert "localhost:8000" not in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [page for page in DOCS if curl_commands(page)], ids=name_of)
def test_a_page_with_curl_shows_an_answer(page: Path) -> None:
    shown = {block.language for block in blocks_of(page)}
    assert shown & {"json", "text", "console"}, f"{name_of(page)} shows no answer"
