"""The fenced blocks of all pages: the language of each, and whether it can be run unchanged.

The language determines what happens to a block:

- `sh` and `console` (its commands follow `$ `) are run by a shell;
- the `python` blocks of a page are run one after the other as one program;
- `json` and `toml` are parsed; others are only shown.

If a block cannot be run, a comment in the line above gives the reason:

    <!-- not run: it starts a server that stays -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOP_PAGES = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = [*(ROOT / name for name in TOP_PAGES), *sorted((ROOT / "docs").rglob("*.md"))]
FIRST_TEN_MINUTES = ROOT / "docs" / "start" / "first-ten-minutes.md"
"""A page whose commands start and stop servers. tests/e2e/test_first_ten_minutes.py runs it."""
SHELL, PYTHON = ("sh", "console"), "python"
LANGUAGES = {*SHELL, PYTHON, "json", "toml", "yaml", "text"}
COMMANDS = ("curl", "tidegate", ".venv/bin/", "make", "python", "pip", "$", "docker", "systemctl")
"""A block that starts with one of these is a shell command."""
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_WORDS = re.compile(r"""(?:[^"'<>|&]|"[^"]*"|'[^']*')*""")
"""The start of a command, up to a redirection, a pipe or a background sign that is not quoted."""
_PROMPT = re.compile(r"\w*\$ ")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page.

    line    number of its first line of text, from 1
    reason  why it is not run; "" if it is
    """

    page: Path
    line: int
    language: str
    text: str
    reason: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def script(self) -> str:
        """Return the block's text for a shell: all of it, or only the commands of a console
        block."""
        if self.language != "console":
            return self.text
        kept, continues = [], False
        for line in self.text.splitlines():
            prompt = _PROMPT.match(line)
            if prompt or continues:
                kept.append(line[prompt.end() :] if prompt else line)
                continues = line.endswith("\\")
        return "\n".join(kept)


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("text")) + 1
        yield Block(page, line, found["language"], found["text"], found["reason"] or "")


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page)]


def commands_of(script: str) -> Iterator[str]:
    """Yield the `tidegate` commands of a script, without redirections and what follows a pipe.
    Continued lines are joined."""
    for line in script.replace("\\\n", " ").splitlines():
        line = _PROMPT.sub("", line, count=1) if _PROMPT.match(line) else line
        found = re.match(r"(?:\S*/)?tidegate (.*)", line.partition(" #")[0].strip())
        if found:
            yield _WORDS.match(found[1])[0].strip()  # type: ignore[index]
