"""The examples of docs/api-chat.md are requests that are taken, with no field in vain."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.body import decode, unknown_fields
from gateway.openai import schema
from gateway.openai.schema import BatchBody, ChatBody, CompletionBody

PAGE = (Path(__file__).parents[2] / "docs" / "api-chat.md").read_text()
EXAMPLES = re.findall(r":8000(/v1/\S+) --json '([^']+)'", PAGE)
KINDS = {
    "/v1/chat/completions": (schema.chat_decoder, ChatBody),
    "/v1/chat/completions/batch": (schema.batch_decoder, BatchBody),
    "/v1/completions": (schema.completion_decoder, CompletionBody),
}


@pytest.mark.parametrize(("route", "example"), EXAMPLES)
def test_an_example_is_a_request_that_is_taken_whole(route: str, example: str) -> None:
    decoder, kind = KINDS[route]
    assert isinstance(decode(example.encode(), decoder), kind)
    assert unknown_fields(example.encode(), kind) == []


def test_there_is_an_example_of_each_route() -> None:
    assert {route for route, _ in EXAMPLES} == set(KINDS)


def test_every_field_of_the_table_exists() -> None:
    table = PAGE.partition("## Beside")[2]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    fields = set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert fields <= set(ChatBody.__struct_fields__)
