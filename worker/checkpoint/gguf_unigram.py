"""Rebuilds the tokenizer of XLM-RoBERTa, SentencePiece's unigram model, from a GGUF file.

llama.cpp calls this kind "t5". Its converter stores the pieces with their log probabilities, the
table of normalisation rules, and two of SentencePiece's settings for spaces. A file that lacks a
setting has SentencePiece's default for it.
"""

from __future__ import annotations

from base64 import b64encode
from math import isfinite

from worker.checkpoint.gguf_tokens import (
    BYTE,
    CONTROL,
    SPACE,
    UNKNOWN,
    UNUSED,
    Part,
    added_tokens,
    encoder_markers,
    numbers,
    strings,
    template,
    template_step,
)
from worker.checkpoint.sentencepiece_rules import charsmap_error
from worker.errors import FETCH_AGAIN, UnusableModel
from worker.spec.fields import Fields

MASK = "<mask>"
"""Name of the mask token. SentencePiece's model does not have it, and so the converter writes an
unused token in its place."""


def unigram(fields: Fields) -> Part:
    """Return the parts of the tokenizer. Raises UnusableModel, naming the key that is missing or
    wrong."""
    tokens = list(strings(fields, "tokens"))
    kinds = list(numbers(fields, "token_type", len(tokens)))
    _name_mask(fields, tokens, kinds)
    is_prefixed = fields.flag("tokenizer.ggml.add_space_prefix", True)
    trims = fields.flag("tokenizer.ggml.remove_extra_whitespaces", True)
    has_bytes = BYTE in kinds
    decoders = [{"type": "ByteFallback"}] * has_bytes + [_spaces(prefixes=is_prefixed)]
    return {
        "added_tokens": added_tokens(tokens, kinds),
        "normalizer": _normalizer(fields, is_prefixed=is_prefixed, trims=trims),
        "pre_tokenizer": _pre_tokenizer(is_prefixed=is_prefixed, trims=trims),
        "post_processor": _markers(fields, tokens),
        "decoder": _sequence("decoders", decoders),
        "model": {
            "type": "Unigram",
            "unk_id": _unknown(fields, kinds),
            "vocab": _scored_pieces(fields, tokens, kinds),
            "byte_fallback": has_bytes,
        },
    }


def _name_mask(fields: Fields, tokens: list[str], kinds: list[int]) -> None:
    """Rename the mask token to its usual name and make it a control token, if the file lists it as
    unused and has no token of that name."""
    mask = fields.integer("tokenizer.ggml.mask_token_id", -1)
    if 0 <= mask < len(tokens) and kinds[mask] == UNUSED and MASK not in tokens:
        tokens[mask], kinds[mask] = MASK, CONTROL


def _scored_pieces(fields: Fields, tokens: list[str], kinds: list[int]) -> list[tuple[str, float]]:
    """Return (piece, log probability), in the order of their ids.

    No text may be split into unused tokens, so their names get a space, which is in no text after
    the spaces are replaced. Their scores of -10,000 are not kept, because the gateway's library
    derives that of unknown characters from the lowest score.
    """
    scores = numbers(fields, "scores", len(tokens))
    if not all(map(isfinite, scores)):
        raise UnusableModel(
            "tokenizer.ggml.scores holds a number that is not finite", remedy=FETCH_AGAIN
        )
    return [
        (token, 0.0 if token == MASK else float(score))
        if token and kind != UNUSED
        else (f" {token}", 0.0)
        for token, kind, score in zip(tokens, kinds, scores, strict=True)
    ]


def _unknown(fields: Fields, kinds: list[int]) -> int:
    """Return the id of the token for characters that no piece has."""
    usual = kinds.index(UNKNOWN) if UNKNOWN in kinds else -1
    unknown = fields.integer("tokenizer.ggml.unknown_token_id", usual)
    if not 0 <= unknown < len(kinds):
        raise UnusableModel("tokenizer.ggml.unknown_token_id is missing, or outside the vocabulary")
    return unknown


def _normalizer(fields: Fields, *, is_prefixed: bool, trims: bool) -> Part | None:
    """Return the step that applies the file's rules. It also trims or prefixes the text, unless
    `_pre_tokenizer` does both; None if there is nothing to do."""
    steps: list[Part] = []
    if (table := _charsmap(fields)) is not None:
        steps.append({"type": "Precompiled", "precompiled_charsmap": b64encode(table).decode()})
    if trims and not is_prefixed:
        steps += [
            {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
            {"type": "Strip", "strip_left": True, "strip_right": True},
        ]
    if is_prefixed and not trims:
        steps.append({"type": "Prepend", "prepend": " "})
    return _sequence("normalizers", steps) if steps else None


def _pre_tokenizer(*, is_prefixed: bool, trims: bool) -> Part:
    """Return the step that splits a text into words, and replaces its spaces.

    XLM-RoBERTa prefixes and trims: its published tokenizers drop all white space and prefix each
    word. Other settings need the normalizer. Without a prefix, dropping the white space would join
    words; without trimming, this step would not prefix a text that starts with a space.
    """
    if is_prefixed and trims:
        split = {"type": "WhitespaceSplit"}
        return _sequence("pretokenizers", [split, _spaces(prefixes=True)])
    return _spaces(prefixes=False)


def _spaces(*, prefixes: bool) -> Part:
    """Return the step that makes spaces visible, or that makes them spaces again in a decoder."""
    scheme = "always" if prefixes else "never"
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": True}


def _charsmap(fields: Fields) -> bytes | None:
    key = "tokenizer.ggml.precompiled_charsmap"
    values = fields.get(key)
    if values is None or values == []:
        return None
    # llama.cpp also reads lists of signed bytes.
    if not isinstance(values, list) or not all(_is_byte(value) for value in values):
        raise UnusableModel(f"{key} is not a list of bytes")
    table = bytes(value & 0xFF for value in values)
    if (error := charsmap_error(table)) is not None:
        raise UnusableModel(f"{key} is damaged: {error}", remedy=FETCH_AGAIN)
    return table


def _is_byte(value: object) -> bool:
    return isinstance(value, int) and -128 <= value < 256


def _markers(fields: Fields, tokens: list[str]) -> Part | None:
    """Return the step that makes `<s> A </s>` of a text, and `<s> A </s></s> B </s>` of a pair;
    None if the file says that neither token is added."""
    before, after = encoder_markers(fields, tokens, ("<s>", "</s>"))
    if not fields.flag("tokenizer.ggml.add_bos_token", True):
        before = {}
    if not fields.flag("tokenizer.ggml.add_eos_token", True):
        after = {}
    if not before and not after:
        return None
    first = template(before, "A", after, 0)
    return template_step(first, first + template(after, "B", after, 0), before | after)


def _sequence(name: str, steps: list[Part]) -> Part:
    """Return the steps as one, of the class whose list of steps is called `name`."""
    return steps[0] if len(steps) == 1 else {"type": "Sequence", name: steps}
