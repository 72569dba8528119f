"""Links between pages lead to files and headings that exist, the index has every page, pages for
contributors name what is in the code, and the changelog has the current version."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.support.docs_blocks import PAGES, ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
ELSEWHERE = ("http://", "https://", "mailto:")
PLACE = re.compile(r"`([\w/]+\.(?:py|js|h))`\s+\(([^()]+)\)")
"""A file and, in parentheses, names that it has: "`a/b.py` (`NAME`, `OTHER`)"."""


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them. Code blocks have none."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    for link in LINK.findall(text):
        if link.startswith(ELSEWHERE):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name} links to {link}, which does not exist"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}: no such heading"


def test_every_page_is_one_row_of_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    rows = re.findall(
        r"^\| \[[^\]]+\]\(([^)]+)\) \|", index.read_text(encoding="utf-8"), re.MULTILINE
    )
    pages = {path.relative_to(index.parent).as_posix() for path in index.parent.rglob("*.md")}
    listed = [row for row in rows if not row.startswith("../")]
    assert sorted(listed) == sorted(pages - {"README.md"})


def test_the_changelog_has_a_heading_for_the_version() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    version = config["metadata"]["version"]
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert any(version in heading for heading in headings)


@pytest.mark.parametrize(
    "page", ["contribute/adding.md", "contribute/adding-models.md", "contribute/formats.md"]
)
def test_names_that_a_guide_places_in_a_file_are_in_that_file(page: str) -> None:
    places = PLACE.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    named = [(file, name) for file, text in places for name in re.findall(r"`(\w+)`", text)]
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file, _ in named}
    assert len(named) > 3
    missing = [(file, name) for file, name in named if not re.search(rf"\b{name}\b", texts[file])]
    assert missing == []
