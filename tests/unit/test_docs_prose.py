"""Pages can be read and pasted: short sentences, short pages, no source files in pages for users,
and commands that work with an old curl and show what comes back."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.docs_blocks import PAGES, ROOT, SHELL, blocks_of

DOCS = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
READ = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""Pages that are read from the start to the end."""
USERS = ("docs", "docs/start", "docs/use", "docs/models", "docs/operate", "docs/scale")
"""Folders of pages for users. docs/ itself also has two pages for contributors."""
CONTRIBUTORS = ("architecture.md", "design.md")
ADDRESS = "http://127.0.0.1:8000"
"""The server's address, written the same on all pages."""
NEW_CURL = r"--(?:json|fail-with-body|retry-all-errors|url-query|variable|expand-\w+)\b"
"""Options that curl 7.68 lacks, which Ubuntu 20.04 has."""
MAX_WORDS = 35
MAX_BYTES = 15_000
LONG_SENTENCES = {".": 5, "docs": 7, "docs/contribute": 36, "docs/operate": 28, "docs/scale": 8}
LONG_PAGES = {"docs": 2, "docs/contribute": 3, "docs/operate": 3, "docs/scale": 1}
SOURCE_FILES = {"docs/operate": 37, "docs/scale": 29}
"""Per folder, how many long sentences, long pages and names of source files are left from before
these laws. The numbers only get smaller."""
SOURCE = re.compile(r"(?<!llama)\.(?:py|cpp|h|js)\b")
MODULE = re.compile(r"python -m (?:tests|worker|gateway|engine_core)\b")
_GENERATED = re.compile(r"^<!-- (\w+) -->$.*?^<!-- /\1 -->$", re.MULTILINE | re.DOTALL)
_UNREAD = re.compile(r"^ *```.*?^ *```$|<!--.*?-->", re.MULTILINE | re.DOTALL)
_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.)\s*)")
_END = re.compile(r"(?<=[.!?:])[)*\"]*\s+(?=[A-Z(*\"])")
_NAMES = re.compile(r"`[^`]+`(?:(?:,| and| or)?\s+`[^`]+`)*")
"""A name in code type, or a list of names, which counts as one word."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def folder_of(page: Path) -> str:
    return str(page.parent.relative_to(ROOT))


def prose(text: str) -> str:
    """Return a page's text without blocks of code, generated tables and the targets of links."""
    text = _UNREAD.sub("", _GENERATED.sub("", text))
    return re.sub(r"\[([^\]]*)\]\([^)\s]+\)", r"\1", text)


def sentences(text: str) -> list[str]:
    """Return the sentences of a page's text. A colon before a capital letter ends one, and so does
    the end of a cell of a table."""
    found = []
    for paragraph in _PARAGRAPH.split(prose(text)):
        cells = re.split(r"(?<!\\)\|", paragraph) if paragraph.strip()[:1] == "|" else [paragraph]
        for cell in cells:
            found += _END.split(" ".join(_NAMES.sub("Name", cell).split()))
    return found


def source_files(text: str) -> list[str]:
    """Return the files of our code that a page names in code type, and the modules to be run."""
    text = _UNREAD.sub("", text)
    names = [name for name in re.findall(r"`([^`\n]+)`", text) if SOURCE.search(name)]
    return names + MODULE.findall(text)


def over(pages: list[Path], count: dict[Path, int], left: dict[str, int]) -> dict[str, list[str]]:
    """Return the pages with a count above 0, of the folders whose sum exceeds the one in `left`."""
    sums = Counter[str]()
    for page in pages:
        sums[folder_of(page)] += count[page]
    folders = {folder for folder, number in sums.items() if number > left.get(folder, 0)}
    return {
        f"{folder}: {sums[folder]}": [
            f"{page.name}: {count[page]}"
            for page in pages
            if folder_of(page) == folder and count[page]
        ]
        for folder in folders
    }


def curl_commands(page: Path) -> list[str]:
    """Return the lines of the page's shell blocks that run curl. Continued lines are joined."""
    scripts = [block.script for block in blocks_of(page) if block.language in SHELL]
    lines = [line for text in scripts for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if re.search(r"\bcurl ", line)]


def test_a_text_is_cut_into_sentences() -> None:
    text = (
        "# A title\n\nOne `a.b: c`, two. Three\nfour: five [six](seven.md).\n"
        "- Eight: `x`, `y` and `z`.\n\n```sh\nnine. ten.\n```\n<!-- t -->\n| u |\n<!-- /t -->\n"
        "| eleven. Twelve | thirteen \\| x |\n"
    )
    assert [each for each in sentences(text) if each.strip("#- ")] == [
        *("# A title", "One Name, two.", "Three four: five six.", "- Eight:", "Name."),
        *("eleven.", "Twelve", "thirteen \\| x"),
    ]


def test_sentences_are_short() -> None:
    long = {
        page: [each for each in sentences(page.read_text()) if len(each.split()) > MAX_WORDS]
        for page in READ
    }
    for page, found in long.items():
        for sentence in found:
            print(f"{name_of(page)}: {len(sentence.split())} words: {sentence}")
    assert over(READ, {page: len(found) for page, found in long.items()}, LONG_SENTENCES) == {}


def test_pages_are_short() -> None:
    long = {page: int(page.stat().st_size > MAX_BYTES) for page in READ}
    assert over(READ, long, LONG_PAGES) == {}


def test_pages_for_users_name_no_source_file() -> None:
    pages = [page for page in DOCS if folder_of(page) in USERS and page.name not in CONTRIBUTORS]
    found = {page: source_files(page.read_text()) for page in pages}
    for page, names in found.items():
        for name in names:
            print(f"{name_of(page)}: {name}")
    assert over(pages, {page: len(names) for page, names in found.items()}, SOURCE_FILES) == {}


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
