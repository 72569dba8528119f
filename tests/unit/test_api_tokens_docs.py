"""docs/api-tokens.md names every field there is, and its examples are requests that are taken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.body import decode, unknown_fields
from gateway.tokens import generate_ask as asking
from gateway.tokens.generate_schema import (
    REFUSED,
    REFUSED_SAMPLING,
    GenerateBody,
    GenerateSampling,
    generate_decoder,
)
from tests.support.scripted_engine import scripted_card
from tests.support.served import served

PAGE = (Path(__file__).parents[2] / "docs" / "api-tokens.md").read_text()
EXAMPLES = re.findall(r"/inference/v1/generate --json '([^']+)'", PAGE)


def words(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def first_column(section: str) -> set[str]:
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return words(" ".join(rows))


def test_every_field_is_in_the_table_of_its_struct_or_named_as_refused() -> None:
    request, sampling = PAGE.split("## The request")[1].split("### `sampling_params`")
    sampling = sampling.split("## Streams")[0]
    assert first_column(request) | set(REFUSED) == set(GenerateBody.__struct_fields__)
    others = words(sampling.rpartition("Without effect:")[2])
    assert set(REFUSED_SAMPLING) < others
    assert first_column(sampling) | others == set(GenerateSampling.__struct_fields__)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_a_request_that_is_taken_whole(example: str) -> None:
    body = decode(example.encode(), generate_decoder)
    assert unknown_fields(example.encode(), GenerateBody) == []
    asking.check(body, max_n=8)
    assert asking.ask_of(body, served(scripted_card())).choices


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4
