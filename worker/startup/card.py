"""`python -P -m worker.startup.card MODEL FILE`: write the card of a model for use without an
engine.

A gateway without an engine uses the card. Only the text side of the model is read: the weights may
be missing, any architecture works, and torch is not needed. MODEL is a GGUF file or a directory
with tokenizer.json. The card's digest covers only the text side, so it differs from the digest that
an engine with the weights reports.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

import msgspec

from protocol.engine.model_card import CardFile, ModelCard, sampling_defaults, write_card
from protocol.shared.gguf_parts import model_name
from worker.checkpoint.gguf_file import GGUFFile
from worker.checkpoint.gguf_tokenizer import gguf_text
from worker.checkpoint.text import TextFacts, directory_name, directory_text, token_ids
from worker.errors import REMEDY, UnusableModel
from worker.spec.fields import Fields, read_json

UNKNOWN_CONTEXT = 1 << 20
"""Context length if the model's files give none."""


def text_card(path: Path) -> ModelCard:
    """Return the card of a model's text side. Raises UnusableModel, whose one-line message names
    what is missing or damaged."""
    if not path.exists():
        raise UnusableModel(f"{path} does not exist")
    return _directory_card(path) if path.is_dir() else _gguf_card(path)


def _directory_card(path: Path) -> ModelCard:
    config: dict[str, Any] = {}
    if (path / "config.json").is_file():
        config = read_json(path / "config.json")
    settings = path / "tokenizer_config.json"
    tokenizer_config = read_json(settings) if settings.is_file() else {}
    text = directory_text(path, Fields(config, "config.json"))
    described = Fields({**config, **(config.get("text_config") or {})}, "config.json")
    highest = max(token_ids(read_json(path / "tokenizer.json")).values(), default=-1)
    context = described.integer("max_position_embeddings", 0)
    return card_of_text(
        directory_name(path),
        (config.get("architectures") or [""])[0],
        text,
        vocab_size=described.integer("vocab_size", 0) or highest + 1,
        context_tokens=context or _known_length(tokenizer_config.get("model_max_length")),
    )


def _known_length(length: Any) -> int:
    """Return `model_max_length`, or UNKNOWN_CONTEXT if it is missing or a huge placeholder."""
    return length if isinstance(length, int) and 0 < length < UNKNOWN_CONTEXT else UNKNOWN_CONTEXT


def _gguf_card(path: Path) -> ModelCard:
    fields = Fields(GGUFFile(path).metadata, str(path))
    architecture = fields.text("general.architecture")
    tokens = fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise UnusableModel(f"{path} has no vocabulary")
    return card_of_text(
        model_name(path),
        architecture,
        gguf_text(fields, len(tokens)),
        vocab_size=len(tokens),
        context_tokens=fields.integer(f"{architecture}.context_length", UNKNOWN_CONTEXT),
    )


def card_of_text(
    name: str, architecture: str, text: TextFacts, *, vocab_size: int, context_tokens: int
) -> ModelCard:
    """Return a card without facts about weights. Its digest covers the text side only."""
    return ModelCard(
        name=name,
        architecture=architecture,
        digest=hashlib.sha256(text.tokenizer + repr(text.eos_token_ids).encode()).hexdigest(),
        vocab_size=vocab_size,
        context_tokens=context_tokens,
        tokenizer=text.tokenizer,
        eos_token_ids=text.eos_token_ids,
        bos_token_id=text.bos_token_id,
        pad_token_id=text.pad_token_id,
        special_tokens=text.special_tokens,
        chat_template=text.chat_template,
        tool_use_template=text.tool_use_template,
        response_template=text.response_template,
        defaults=text.defaults,
        license=text.license,
        infill_tokens=text.infill_tokens,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="worker.startup.card")
    parser.add_argument("model", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--max-len", type=int, default=0)
    parser.add_argument("--recommended-sampling", type=sampling_defaults, default="")
    options = parser.parse_args()
    try:
        card = text_card(options.model)
        card = msgspec.structs.replace(card, recommended=options.recommended_sampling)
    except UnusableModel as error:
        print(f"{error.message}; {error.remedy or REMEDY}", file=sys.stderr)
        return 1
    write_card(options.file, CardFile(card=card, max_len=options.max_len or card.context_tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
