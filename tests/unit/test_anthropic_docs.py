"""docs/api-messages.md agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from gateway.api.anthropic.conversation import LEFT_OUT
from gateway.api.anthropic.requests import CountBody
from gateway.api.anthropic.responses import ERROR_TYPES, StopReason
from gateway.api.openai.requests import FormFields, SamplingFields
from gateway.formats.event_builder import INVALID_ARGUMENTS

PAGE = (Path(__file__).parents[2] / "docs" / "api-messages.md").read_text()
NOT_ON_THE_PAGE = {
    "chat_template",
    "include_stop_str_in_output",
    "output_format",
    "skip_special_tokens",
}
"""Fields that the page omits because they are rarely useful. The OpenAPI document has them."""


def first_words(title: str) -> set[str]:
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE)
    return {word for row in rows for word in re.findall(r"`([\w-]+)`", row)}


def test_the_page_names_every_field() -> None:
    fields = set(CountBody.__struct_fields__) - NOT_ON_THE_PAGE
    shared_fields = set(FormFields.__struct_fields__) - set(SamplingFields.__struct_fields__)
    shared_fields -= {"structured_outputs"}  # docs/formats.md has them, and the page refers to it
    assert fields - shared_fields <= set(re.findall(r"`(\w+)`", PAGE))
    assert first_words("The request") <= fields


def test_the_page_names_every_stop_reason() -> None:
    assert first_words("The answer") - {"stop_reason"} == set(get_args(StopReason))


def test_the_page_lists_every_error_type_with_its_status() -> None:
    for status, kind in ERROR_TYPES.items():
        assert re.search(rf"^\| {status} \| `{kind}`", PAGE, re.MULTILINE)


def test_the_page_names_the_codes_of_warnings() -> None:
    assert {LEFT_OUT, INVALID_ARGUMENTS} <= set(re.findall(r"`(\w+)`", PAGE))
