"""docs/api-chat.md lists only fields that a chat request has. tests/e2e/test_docs_blocks.py runs
the examples of the page."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.api.openai.requests import ChatBody

PAGE = (Path(__file__).parents[2] / "docs" / "api-chat.md").read_text()


def test_every_field_of_the_table_exists() -> None:
    table = PAGE.partition("## Beside")[2]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    fields = set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert fields <= set(ChatBody.__struct_fields__)
