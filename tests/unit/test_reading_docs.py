"""The pages about tool calls, thinking and formats agree with the code."""

from __future__ import annotations

import re

from gateway.formats import event_builder
from gateway.formats.reasoning import REASONING
from gateway.formats.registry import REASONING_OF_ANSWER_SYNTAX, TOOLS
from gateway.generation.request import NOT_CALLED
from gateway.prompt.kwargs import REASONING_EFFORTS
from tests.support.processes import ROOT
from tests.support.scenarios import TRUTH

PAGE = (ROOT / "docs" / "use" / "formats.md").read_text()
THINKING = (ROOT / "docs" / "use" / "thinking.md").read_text()
FILES = (ROOT / "docs" / "contribute" / "formats.md").read_text()


def words(text: str) -> list[str]:
    return re.findall(r"`([\w-]+)`", text)


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def test_every_reasoning_format_is_listed_in_order() -> None:
    listed = words(section("Reasoning formats"))
    assert listed == sorted({*REASONING, *REASONING_OF_ANSWER_SYNTAX})


def test_every_tool_format_is_listed_with_its_syntax_and_each_syntax_with_its_file() -> None:
    listed: dict[str, str] = {}
    files: dict[str, str] = dict(re.findall(r"^\| (.*?) \| `(\w+)\.py` \|$", FILES, re.MULTILINE))
    for row, syntax in re.findall(r"^\| (`.*?) \| (.*) \|$", section("Tool formats"), re.MULTILINE):
        names = words(row)
        assert names == sorted(names)
        listed |= dict.fromkeys(names, files[syntax])
    assert listed == {
        name: type(syntax).__module__.rpartition(".")[2] for name, syntax in TOOLS.items()
    }


def test_the_truth_table_is_the_one_that_is_tested() -> None:
    rows = re.findall(r"^\| (\w+) \| (\w+) \| (yes|no) \| (\w+) \|$", PAGE, re.MULTILINE)
    assert [(choice, calls, cut == "yes", reason) for choice, calls, cut, reason in rows] == TRUTH


def test_every_warning_and_every_effort_is_explained() -> None:
    assert set(words(section("Warnings"))) >= {
        event_builder.PARSE_FAILED,
        event_builder.INVALID_ARGUMENTS,
        event_builder.UNKNOWN_TOOL,
        NOT_CALLED,
    }
    for effort in REASONING_EFFORTS:
        assert f'"{effort}"' in THINKING
