"""docs/api-embeddings.md lists every field of the routes that encode."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.api.encode.requests import SIDES, EmbeddingsBody, EncodeFields, RerankBody

PAGE = (Path(__file__).parents[2] / "docs" / "api-embeddings.md").read_text()


def named(title: str) -> set[str]:
    """Return the words in code type in a section."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return set(re.findall(r"`(\w+)`", section))


def test_every_field_of_embeddings_is_listed() -> None:
    assert set(EmbeddingsBody.__struct_fields__) <= named("Embeddings")


@pytest.mark.parametrize(
    ("title", "body"), [("Rerank", RerankBody), *(("Score", body) for body in SIDES)]
)
def test_every_own_field_of_the_other_routes_is_listed(
    title: str, body: type[EncodeFields]
) -> None:
    own = set(body.__struct_fields__) - set(EncodeFields.__struct_fields__)
    assert own <= named(title)
