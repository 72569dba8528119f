"""A model that lacks what a request needs: the error names models that have it."""

from __future__ import annotations

import re

import pytest

from gateway.served_model import Ability, check_ability
from protocol.engine.encoding import EncodingCard
from protocol.engine.model_card import ModelCard
from protocol.wire.errors import InvalidRequest
from tests.support.processes import ROOT
from tests.support.scripted_engine import scripted_card
from tools.models.catalogue import HUB_MODELS

CHATS = scripted_card()
SCORES = scripted_card(generates=False, encoding=EncodingCard(task="score", max_tokens=512, size=1))
VECTORS = scripted_card(
    generates=False, encoding=EncodingCard(task="embed", max_tokens=512, size=1)
)
TASKS: dict[Ability, set[str]] = {"embed": {"embed"}, "score": {"embed", "rerank"}}
"""Ability -> the tasks of the catalogue's models that have it."""


@pytest.mark.parametrize(
    ("card", "ability", "message"),
    [
        (CHATS, "embed", "generates text, and has no embeddings; it serves chats and completions;"),
        (CHATS, "score", "generates text, and has no embeddings; it serves chats and completions;"),
        (SCORES, "embed", "scores pairs of texts, and has no embeddings; it serves /v1/rerank and"),
    ],
)
def test_the_error_names_a_model_of_the_catalogue_with_the_ability(
    card: ModelCard, ability: Ability, message: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_ability(card, ability, "m")
    text = refused.value.message
    assert message in text
    (name,) = re.findall(r"such as ([\w.-]+)", text)
    assert HUB_MODELS[name].task in TASKS[ability]
    assert ("--pooling" in text) == (card is CHATS), "an option that makes this model do it"


def test_no_other_model_is_named_for_text() -> None:
    with pytest.raises(InvalidRequest, match=r"it serves /v1/embeddings, [^;]*$"):
        check_ability(VECTORS, "generate", "m")


def test_the_page_names_all_models_of_the_catalogue_that_encode() -> None:
    page = (ROOT / "docs" / "use" / "api-embeddings.md").read_text()
    rows = dict(re.findall(r"^\| (vectors|scores of pairs) \|(.*)\|$", page, re.MULTILINE))
    for row, task in (("vectors", "embed"), ("scores of pairs", "rerank")):
        named = set(re.findall(r"`([^`]+)`", rows[row]))
        assert named == {name for name, entry in HUB_MODELS.items() if entry.task == task}
