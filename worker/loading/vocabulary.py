"""Whether two models mean the same by a token id."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from worker.loading.errors import UnusableModel


class Vocabulary(Protocol):
    """A model's card, or its header."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tokenizer(self) -> bytes: ...


def check_draft(draft: Vocabulary, model: Vocabulary) -> None:
    """Raises UnusableModel where `draft` cannot guess for `model`."""
    if _tokens(draft) != _tokens(model):
        raise UnusableModel(
            f"the draft model {draft.name} has another vocabulary than {model.name} "
            f"({draft.vocab_size:,} and {model.vocab_size:,} ids); it must have the same tokenizer",
            remedy="choose another --draft-model",
        )


def _tokens(card: Vocabulary) -> tuple[Any, dict[str, int]]:
    """What tokenizer.json says of ids: the vocabulary, in whatever form, and added tokens."""
    tokenizer = msgspec.json.decode(card.tokenizer)
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    return tokenizer["model"].get("vocab"), added
