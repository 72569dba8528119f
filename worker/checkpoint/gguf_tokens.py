"""Reads the token lists of a GGUF file, and makes the parts that several kinds of tokenizers share.
Needs no torch."""

from __future__ import annotations

from typing import Any

from worker.checkpoint.gguf_roles import END_TEXTS, ends_answer
from worker.errors import UnusableModel
from worker.spec.fields import Fields

Part = dict[str, Any]
"""A part of tokenizer.json."""
Marker = dict[str, int]
"""{token: id} of a token that is added to texts; empty: none is added."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type`."""
SPACE = "\u2581"
"""SentencePiece's visible replacement for a space."""


def strings(fields: Fields, name: str) -> list[str]:
    """Return a list of strings. Raises UnusableModel if it is missing, or has other values."""
    values = fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not set(map(type, values)) <= {str}:
        raise UnusableModel(f"tokenizer.ggml.{name} is missing, or is not a list of strings")
    return values


def numbers(fields: Fields, name: str, count: int) -> list[Any]:
    """Return a list of `count` numbers. Raises UnusableModel if there is none."""
    values = fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or len(values) != count or str in set(map(type, values)):
        raise UnusableModel(f"tokenizer.ggml.{name} is not a list of {count:,} numbers")
    return values


def added_tokens(tokens: list[str], kinds: list[int]) -> list[Part]:
    """Return the unknown, control and user-defined tokens, which are matched before the text is
    split into pieces. Tokens that end an answer are among them, whatever their type in the file."""
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
        if (tokens[index] in END_TEXTS and ends_answer(tokens[index], kind))
        or (kind in (UNKNOWN, CONTROL, USER_DEFINED) and tokens[index])
    ]


def encoder_markers(
    fields: Fields, tokens: list[str], usual: tuple[str, str]
) -> tuple[Marker, Marker]:
    """Return the CLS token, which is before each text, and the SEP token, which is after it.

    usual   their names in a file that does not give their ids

    Raises UnusableModel if one of them is not in the vocabulary.
    """
    found: list[Marker] = []
    for names, name in zip((("cls", "bos"), ("seperator", "eos")), usual, strict=True):
        keys = [f"tokenizer.ggml.{each}_token_id" for each in names]
        index = next((fields.integer(key) for key in keys if key in fields), None)
        if index is None:
            index = tokens.index(name) if name in tokens else -1
        if not 0 <= index < len(tokens):
            raise UnusableModel(f"{keys[0]} is missing, or outside the vocabulary")
        found.append({tokens[index]: index})
    return found[0], found[1]


def template(before: Marker, name: str, after: Marker, type_id: int) -> list[Part]:
    """Return the template of the text `name`, "A" or "B", between two markers."""
    special = [
        [{"SpecialToken": {"id": t, "type_id": type_id}} for t in part] for part in (before, after)
    ]
    return [*special[0], {"Sequence": {"id": name, "type_id": type_id}}, *special[1]]


def template_step(single: list[Part], pair: list[Part], markers: Marker) -> Part:
    """Return the step that adds the `markers` of two templates to texts and to pairs of texts."""
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": {
            token: {"id": token, "ids": [index], "tokens": [token]}
            for token, index in markers.items()
        },
    }
