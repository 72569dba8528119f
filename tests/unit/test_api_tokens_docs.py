"""docs/api-tokens.md lists every field of a generate request, except top-level fields that are
refused. tests/e2e/test_docs_blocks.py runs the examples of the page."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.api.tokens.requests import REFUSED, REFUSED_SAMPLING, GenerateBody, GenerateSampling

PAGE = (Path(__file__).parents[2] / "docs" / "api-tokens.md").read_text()


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
