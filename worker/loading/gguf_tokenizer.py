"""Rebuilds `tokenizer.json` from the vocabulary of a GGUF file.

The llama architecture has two kinds: "gpt2" is byte-level BPE with explicit merges, and "llama" is
SentencePiece BPE with a score per piece and byte fallback. The output is built as plain dicts,
because the library that reads it runs in another process.
"""

from __future__ import annotations

from typing import Any

import msgspec

from worker.loading.errors import UnusableModel
from worker.loading.fields import Fields
from worker.loading.pretokenizers import FAMILIES, Family, Part

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
SPACE = "\u2581"
"""SentencePiece's visible replacement for a space."""


def tokenizer_json(fields: Fields) -> bytes:
    """Return tokenizer.json for the file's metadata. Raises UnusableModel, naming what is missing
    or unknown."""
    kind = fields.text("tokenizer.ggml.model")
    if kind == "gpt2":
        parts = _byte_level(fields)
    elif kind == "llama":
        parts = _sentencepiece(fields)
    else:
        raise UnusableModel(f"tokenizer model {kind!r} is not supported, only 'gpt2' and 'llama'")
    whole = {"version": "1.0", "truncation": None, "padding": None, **parts}
    return msgspec.json.encode(whole)


def _byte_level(fields: Fields) -> Part:
    name = fields.text("tokenizer.ggml.pre", "default")
    if name not in FAMILIES:
        raise UnusableModel(
            f"pre-tokenizer {name!r} is not supported, only {', '.join(sorted(FAMILIES))}"
        )
    family: Family = FAMILIES[name]
    vocab = _vocab(_strings(fields, "tokens"))
    merges = [merge.split(" ") for merge in _strings(fields, "merges")]
    _check_merges(merges, vocab)
    return {
        "added_tokens": _added_tokens(fields),
        "normalizer": family.normalizer,
        "pre_tokenizer": family.pre_tokenizer,
        "post_processor": _post_processor(fields, adds_bos=family.adds_bos),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": _bpe(vocab, merges, ignore_merges=family.ignore_merges),
    }


def _sentencepiece(fields: Fields) -> Part:
    tokens = _strings(fields, "tokens")
    vocab = _vocab(tokens)
    unknown = fields.integer("tokenizer.ggml.unknown_token_id", 0)
    prefixed = fields.flag("tokenizer.ggml.add_space_prefix", True)
    to_spaces = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    from_spaces = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    prefix = [{"type": "Prepend", "prepend": SPACE}] if prefixed else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    return {
        "added_tokens": _added_tokens(fields),
        "normalizer": {"type": "Sequence", "normalizers": prefix + to_spaces},
        "pre_tokenizer": None,
        "post_processor": _post_processor(fields, adds_bos=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [*from_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": _bpe(
            vocab,
            _merges_by_score(vocab, _numbers(fields, "scores", len(tokens))),
            unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _bpe(vocab: dict[str, int], merges: list[list[str]], **options: Any) -> Part:
    return {"type": "BPE", "dropout": None, "vocab": vocab, "merges": merges, **options}


def _vocab(tokens: list[str]) -> dict[str, int]:
    """Return token -> id; the first of equal tokens counts."""
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocab.setdefault(token, index)
    return vocab


def _check_merges(merges: list[list[str]], vocab: dict[str, int]) -> None:
    """Check that every merge joins two tokens into a token; the gateway's library requires it."""
    for merge in merges:
        match merge:
            case [left, right] if left in vocab and right in vocab and left + right in vocab:
                continue
        raise UnusableModel(f"merge {' '.join(merge)!r} does not join two tokens into a third")


def _merges_by_score(vocab: dict[str, int], scores: list[float]) -> list[list[str]]:
    """Return all pairs of pieces that form a piece: best score first, then the longer left part."""
    ranked = []
    for piece, index in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], -cut, index, left, right))
    ranked.sort(key=lambda merge: merge[:3])
    return [[left, right] for *_, left, right in ranked]


def _added_tokens(fields: Fields) -> list[Part]:
    """Return control and user-defined tokens, which are matched in the text before all else."""
    tokens = _strings(fields, "tokens")
    kinds = _numbers(fields, "token_type", len(tokens))
    return [
        {
            "id": index,
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for index, kind in enumerate(kinds)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and tokens[index]
    ]


def _post_processor(fields: Fields, *, adds_bos: bool) -> Part | None:
    """Add bos before and eos after the text, if the file requests them."""
    before = _marker(fields, "bos", wanted=fields.flag("tokenizer.ggml.add_bos_token", adds_bos))
    after = _marker(fields, "eos", wanted=fields.flag("tokenizer.ggml.add_eos_token", False))
    if not before and not after:
        return None
    first, second = (
        _template(before, name, after, type_id) for name, type_id in (("A", 0), ("B", 1))
    )
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": {
            token: {"id": token, "ids": [index], "tokens": [token]}
            for token, index in (before | after).items()
        },
    }


def _marker(fields: Fields, name: str, *, wanted: bool) -> dict[str, int]:
    """Return {token: id}; empty if it is not wanted or the file has none."""
    tokens = _strings(fields, "tokens")
    index = fields.integer(f"tokenizer.ggml.{name}_token_id", -1)
    return {tokens[index]: index} if wanted and 0 <= index < len(tokens) else {}


def _template(before: dict[str, int], name: str, after: dict[str, int], type_id: int) -> list[Part]:
    special = [
        [{"SpecialToken": {"id": t, "type_id": type_id}} for t in part] for part in (before, after)
    ]
    return [*special[0], {"Sequence": {"id": name, "type_id": type_id}}, *special[1]]


def _strings(fields: Fields, name: str) -> list[str]:
    values = fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise UnusableModel(f"tokenizer.ggml.{name} is missing, or is not a list of strings")
    return values


def _numbers(fields: Fields, name: str, count: int) -> list[Any]:
    values = fields.get(f"tokenizer.ggml.{name}")
    if (
        not isinstance(values, list)
        or len(values) != count
        or any(isinstance(v, str) for v in values)
    ):
        raise UnusableModel(f"tokenizer.ggml.{name} is not a list of {count:,} numbers")
    return values
