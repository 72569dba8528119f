"""A model's markers: added tokens that are not text, found by their spelling.

llguidance treats an added token as a marker if its tokenizer calls it special, or if it is spelled
<like this>. Such a token is possible only where a grammar names it. Some tokenizers add other
markers ("[TOOL_CALLS]") without calling them special. This file corrects that, so that a marker is
never text for us either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

Markers = Mapping[str, int]
"""Spelling of a marker -> its token id."""


Divider = Callable[[str], list[str]]


class AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Tokenizer(msgspec.Struct):
    added_tokens: list[AddedToken] = []


def added_tokens(tokenizer: bytes) -> list[AddedToken]:
    """Return the added tokens of a tokenizer.json.

    Raises msgspec.MsgspecError if it is malformed.
    """
    return msgspec.json.decode(tokenizer, type=_Tokenizer).added_tokens


def with_markers_special(tokenizer: bytes) -> bytes:
    """Return the tokenizer with every marker among its added tokens marked as special."""
    missing = [token for token in added_tokens(tokenizer) if _is_missed_marker(token)]
    if not missing:
        return tokenizer
    ids = {token.id for token in missing}
    parts: dict[str, Any] = msgspec.json.decode(tokenizer, type=dict[str, msgspec.Raw])
    tokens: list[dict[str, Any]] = msgspec.json.decode(parts["added_tokens"])
    parts["added_tokens"] = [
        token | {"special": True} if token["id"] in ids else token for token in tokens
    ]
    return msgspec.json.encode(parts)


def _is_missed_marker(token: AddedToken) -> bool:
    return not token.special and not _has_angle_brackets(token.content) and is_marker(token.content)


def _has_angle_brackets(text: str) -> bool:
    return text.startswith("<") and text.endswith(">")


def is_marker(text: str) -> bool:
    """Whether the text starts and ends with punctuation and contains a letter or digit."""
    return (
        bool(text)
        and not any(end.isalnum() or end.isspace() for end in (text[0], text[-1]))
        and any(map(str.isalnum, text))
    )


def divider(markers: Markers) -> Divider:
    """Return a function that splits a text at its markers, which end up at the odd indexes."""
    longest_first = sorted(markers, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"
    return re.compile(f"({pattern})").split
