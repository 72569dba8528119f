"""Checks that two models have the same vocabulary."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from worker.loading.errors import UnusableModel


class Vocabulary(Protocol):
    """The part of a model's card or header that is compared."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tokenizer(self) -> bytes: ...


def check_draft(draft: Vocabulary, model: Vocabulary) -> None:
    """Raise UnusableModel if `draft` cannot draft tokens for `model`."""
    if _tokens(draft) != _tokens(model):
        raise UnusableModel(
            f"the draft model {draft.name} and {model.name} have different vocabularies "
            f"({draft.vocab_size:,} and {model.vocab_size:,} ids); they must share a tokenizer",
            remedy="choose another --draft-model",
        )


def _tokens(card: Vocabulary) -> tuple[Any, dict[str, int]]:
    """Return all ids that tokenizer.json assigns: the vocabulary in its own form, and the added
    tokens."""
    tokenizer = msgspec.json.decode(card.tokenizer)
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    return tokenizer["model"].get("vocab"), added
