"""Real tokenizers for tests, as the bytes of a tokenizer.json, and cards around them."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers as hf
from tokenizers import decoders, models

from gateway.text.tokenizer import Tokenizer
from protocol.model_card import ModelCard
from tests.support.model import smollm2_gguf
from worker.loading.fields import Fields
from worker.loading.gguf_file import GGUFFile
from worker.loading.gguf_tokenizer import tokenizer_json

FAMILIES = Path(__file__).parents[3] / "shared" / "tokenizers"
"""Present on developers' machines only; tests that want one of these skip where it is absent."""
FAMILY_NAMES = ("qwen3", "llama3_1", "deepseek_v3")


def family(name: str) -> tuple[bytes, dict[str, Any]]:
    """(tokenizer.json, tokenizer_config.json) of a model family; skips the test where absent."""
    folder = FAMILIES / name
    if not folder.exists():
        pytest.skip(f"the tokenizer of {name} is not on this machine")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    return (folder / "tokenizer.json").read_bytes(), config


def byte_fallback_json(*, decoder: str = "strip") -> bytes:
    """A small SentencePiece-like tokenizer: words with a blank mark, `<0xNN>` for all else.

    decoder  "strip" as Llama 2, "metaspace" as T5, "wordpiece" for one that is no ByteCodec
    """
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words += ["▁", "▁Hello", "▁world", "Hello", ",", ".", "▁▁", "▁a▁b", "é", "ing", "##ing", "語"]
    vocab = {word: i for i, word in enumerate(words)}
    inner = hf.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.decoder = {
        "strip": lambda: decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
        "metaspace": lambda: decoders.Metaspace(),
        "wordpiece": lambda: decoders.WordPiece(prefix="##", cleanup=False),
    }[decoder]()
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return inner.to_str().encode()


@cache
def real_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of "smollm2" or of a family, made once for all tests; skips where absent."""
    if name == "smollm2":
        return Tokenizer(card_of(smollm2_tokenizer_json(), eos_token_ids=[2]))
    return Tokenizer(card_of(family(name)[0]))


@cache
def smollm2_tokenizer_json() -> bytes:
    """As the worker exports it from the model's file; skips where that is absent."""
    path = smollm2_gguf()
    return tokenizer_json(Fields(GGUFFile(path).metadata, str(path)))


def card_of(tokenizer: bytes, **fields: Any) -> ModelCard:
    """A card of a model that is nothing but its tokenizer."""
    known: dict[str, Any] = {
        "name": "test",
        "architecture": "LlamaForCausalLM",
        "digest": "00",
        "vocab_size": 1 << 18,
        "context_tokens": 8192,
        "eos_token_ids": [],
    }
    return ModelCard(tokenizer=tokenizer, **(known | fields))


def cuts(items: Any, seed: int) -> list[Any]:
    """`items` (a string or a list) cut at random places; joined again they are the same."""
    rng = random.Random(seed)
    pieces, start = [], 0
    while start < len(items):
        end = start + rng.choice((1, 1, 2, 3, 7))
        pieces.append(items[start:end])
        start = end
    return pieces
