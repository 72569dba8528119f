"""Tokenizers of real models, rebuilt from GGUF metadata, encode like the originals."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer

from tests.support.gguf_tokenizers import (
    NUMBERS,
    TEXTS,
    as_metadata,
    assert_same,
    odd_texts,
    rebuilt,
)
from tests.support.model import smollm2_gguf
from tests.support.tokenizers import FAMILY_NAMES, family_json, family_of
from worker.checkpoint.gguf_file import GGUFFile
from worker.checkpoint.gguf_tokenizer import tokenizer_json
from worker.checkpoint.text import TextFacts
from worker.quantize.tokens import tokenizer_metadata
from worker.spec.fields import Fields


def test_smollm2_encodes_like_the_conversion_of_transformers_but_for_digits() -> None:
    """The only difference: transformers does not split off digits first, as this family does."""
    from transformers import AutoTokenizer

    path = smollm2_gguf()
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    metadata = Fields(GGUFFile(path).metadata, "smollm2")
    ours = Tokenizer.from_str(tokenizer_json(metadata).decode())
    assert_same(ours, theirs, [text for text in TEXTS if text not in NUMBERS])
    digits = pre_tokenizers.Digits(individual_digits=True)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([digits, theirs.pre_tokenizer])
    assert_same(ours, theirs)
    for text in TEXTS:
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


PRE_TOKENIZERS = {"qwen3": "qwen2", "llama3_1": "llama-bpe", "deepseek_v3": "hunyuan-dense"}
"""Family -> `tokenizer.ggml.pre` of a model that splits words as it does."""


@pytest.mark.parametrize(
    "name", [name for name in FAMILY_NAMES if name.removeprefix("real ") in PRE_TOKENIZERS]
)
def test_a_tokenizer_encodes_the_same_after_conversion_to_gguf_and_back(name: str) -> None:
    data, family = family_json(name), family_of(name)
    metadata = as_metadata(json.loads(data), PRE_TOKENIZERS[name.removeprefix("real ")])
    if family.begins:
        metadata["bos_token_id"] = metadata["tokens"].index(family.bos)
    theirs = Tokenizer.from_str(data.decode())
    marks = [family.eos, *family.special, *family.marks]
    assert_same(rebuilt(metadata), theirs, TEXTS + odd_texts(500, marks))
    bos = metadata.get("bos_token_id")
    special = {"bos_token": family.bos} if bos is not None and family.bos else {}
    facts = TextFacts(data, eos_token_ids=[0], bos_token_id=bos, special_tokens=special)
    stored = Fields(tokenizer_metadata(facts, len(metadata["tokens"])), "file")
    assert_same(Tokenizer.from_str(tokenizer_json(stored).decode()), theirs)


def gemma() -> Tokenizer:
    """Return a small tokenizer of transformers' class for Gemma, with byte fallback and learned
    merges."""
    named = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pieces = [*named, *(f"<0x{byte:02X}>" for byte in range(256))]
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "\u2581")
    learned.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    plain = [text for text in TEXTS if "<|" not in text]  # no piece looks like a mark
    learned.train_from_iterator(plain, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    model = json.loads(learned.to_str())["model"]
    pieces += [piece for piece in model["vocab"] if piece not in pieces]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    whole: Tokenizer = GemmaTokenizer(
        vocab=vocab, merges=[tuple(merge) for merge in model["merges"]]
    ).backend_tokenizer
    return whole


def test_a_tokenizer_of_gemma_4_encodes_the_same_after_conversion_to_gguf_and_back() -> None:
    """Its merges are listed, and it has byte fallback. llama.cpp adds no space before a text."""
    theirs = gemma()
    metadata = as_metadata(json.loads(theirs.to_str()), "")
    metadata |= {"model": "gemma4", "unknown_token_id": 3, "add_bos_token": False}
    assert any(" " in merge for merge in metadata["merges"])
    assert_same(rebuilt(metadata), theirs, TEXTS + odd_texts(500, ["<bos>", "<eos>"]))


def test_of_equal_tokens_the_first_one_is_used() -> None:
    names = {
        "model": "gpt2",
        "tokens": ["a", "b", "ab", "a", "ab"],
        "token_type": [1] * 5,
        "merges": ["a b"],
    }
    metadata = {f"tokenizer.ggml.{name}": value for name, value in names.items()}
    written = json.loads(tokenizer_json(Fields(metadata, "m.gguf")))
    assert written["model"]["vocab"] == {"a": 0, "b": 1, "ab": 2}
