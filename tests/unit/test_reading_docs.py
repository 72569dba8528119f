"""docs/use/formats.md agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.formats import event_builder
from gateway.formats.reasoning import REASONING
from gateway.formats.registry import REASONING_OF_ANSWER_SYNTAX, TOOLS
from gateway.generation.request import NOT_CALLED
from gateway.prompt.kwargs import REASONING_EFFORTS
from tests.support.scenarios import TRUTH

PAGE = (Path(__file__).parents[2] / "docs" / "use" / "formats.md").read_text()


def words(text: str) -> list[str]:
    return re.findall(r"`([\w-]+)`", text)


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def test_every_reasoning_format_is_listed_in_order() -> None:
    listed = words(section("Thinking").rpartition("Reasoning formats:")[2])
    assert listed == sorted({*REASONING, *REASONING_OF_ANSWER_SYNTAX})


def test_every_tool_format_is_listed_with_the_file_of_its_syntax() -> None:
    listed: dict[str, str] = {}
    for row in re.findall(r"^\| (`.*?) \| .*\(`(\w+)\.py`\) \|$", PAGE, re.MULTILINE):
        names = words(row[0])
        assert names == sorted(names)
        listed |= dict.fromkeys(names, row[1])
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
        assert f'"{effort}"' in section("Thinking")
