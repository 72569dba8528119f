"""Pages can be read and pasted: short sentences, short pages, words that the glossary explains, no
source files in pages for users, and commands for an old curl, with what they print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.docs_blocks import PAGES, ROOT, SHELL, blocks_of

DOCS = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
READ = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""Pages that are read from the start to the end."""
USERS = ("docs", "docs/start", "docs/use", "docs/models", "docs/operate", "docs/scale")
"""Folders of pages for users. docs/ itself also has two pages for contributors."""
CONTRIBUTORS = ("architecture.md", "design.md")
GLOSSARY = ROOT / "docs" / "glossary.md"
EXPLAINED = {
    "draft": r"drafts?",
    "engine": r"engines?",
    "gateway": r"gateways?",
    "kv": r"K/V|KV cache",
    "lease": r"leases?",
    "packed": r"packed",
    "preempt": r"preempt\w*",
    "prefill": r"prefills?",
    "prefix-cache": r"prefix cache",
    "slot": r"slots?",
    "tier": r"tiers?",
    "worker": r"workers?",
}
"""Anchor of the glossary -> words whose first use on a page is a link, to it or to another page."""
EXPLAINING = ("docs/start", "docs/use", "docs/models", "docs/operate", "docs/scale")
"""Folders in which this holds."""
OWN_PAGES = {"packed": "docs/models/memory.md", "kv": "docs/models/memory.md"}
ADDRESS = "http://127.0.0.1:8000"
"""The server's address, written the same on all pages."""
NEW_CURL = r"--(?:json|fail-with-body|retry-all-errors|url-query|variable|expand-\w+)\b"
"""Options that curl 7.68 lacks, which Ubuntu 20.04 has."""
MAX_WORDS = 35
MAX_BYTES = 15_000
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
    return [sentence for sentence in found if sentence]


def source_files(text: str) -> list[str]:
    """Return the files of our code that a page names in code type, and the modules to be run."""
    text = _UNREAD.sub("", text)
    names = [name for name in re.findall(r"`([^`\n]+)`", text) if SOURCE.search(name)]
    return names + MODULE.findall(text)


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
        name_of(page): [
            each for each in sentences(page.read_text()) if len(each.split()) > MAX_WORDS
        ]
        for page in READ
    }
    assert {page: found for page, found in long.items() if found} == {}


def test_pages_are_short() -> None:
    sizes = {name_of(page): page.stat().st_size for page in READ}
    assert {page: size for page, size in sizes.items() if size > MAX_BYTES} == {}


def test_pages_for_users_name_no_source_file() -> None:
    pages = [page for page in DOCS if folder_of(page) in USERS and page.name not in CONTRIBUTORS]
    found = {name_of(page): source_files(page.read_text()) for page in pages}
    assert {page: names for page, names in found.items() if names} == {}


def unexplained(text: str, words: str) -> str:
    """Return the line with the first use of `words` in a page's text, if it is not the text of a
    link; "" if there is none. Headings and what is in code type do not count."""
    text = _UNREAD.sub(_blank, _GENERATED.sub(_blank, text))
    text = re.sub(r"`[^`\n]*`|^#.*$|\]\([^)\s]+\)", _blank, text, flags=re.MULTILINE)
    use = re.search(rf"\b(?:{words})\b", text, re.IGNORECASE)
    if use is None or text.rfind("[", 0, use.start()) > text.rfind("]", 0, use.start()):
        return ""
    return text[text.rfind("\n", 0, use.start()) + 1 :].partition("\n")[0]


def _blank(found: re.Match[str]) -> str:
    """Return as many blanks, and the closing bracket of a link's text."""
    return "".join(char if char in "\n]" else " " for char in found[0])


def test_an_unexplained_word_is_found() -> None:
    assert unexplained("# A slot\n\nThe `slot` of [a slot](b.md), and a slot.", "slots?") == ""
    assert unexplained("<!-- slot -->\nNo [lot](slot.md), two Slots.", "slots?").endswith("Slots.")


@pytest.mark.parametrize("anchor", EXPLAINED)
def test_the_first_use_of_a_word_of_the_glossary_is_a_link(anchor: str) -> None:
    pages = [page for page in DOCS if folder_of(page) in EXPLAINING]
    found = {name_of(page): unexplained(page.read_text(), EXPLAINED[anchor]) for page in pages}
    found.pop(OWN_PAGES.get(anchor, ""), None)
    assert {page: line for page, line in found.items() if line} == {}


def test_the_glossary_is_in_order_and_has_one_sentence_for_each_word() -> None:
    parts = re.split(r"^## ", GLOSSARY.read_text(), flags=re.MULTILINE)[1:]
    entries = {title: text for title, _, text in (part.partition("\n") for part in parts)}
    assert list(entries) == sorted(entries, key=str.lower)
    assert {title: len(sentences(text)) for title, text in entries.items()} == dict.fromkeys(
        entries, 1
    )


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
