"""A model's markers: added tokens of its tokenizer that are not text.

llguidance treats an added token as a marker if the tokenizer marks it as special, or if it is
spelled <like this>. Its masks allow a marker only where the grammar names it: no pattern for text
matches a marker. Some tokenizers add other markers, such as "[TOOL_CALLS]", without marking them as
special. This file marks these as special too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

Markers = Mapping[str, int]
"""Maps the spelling of a marker to its token id."""
Divider = Callable[[str], list[str]]
"""A function that splits a text at its markers. The markers are at the odd indexes of the list."""


class AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Tokenizer(msgspec.Struct):
    added_tokens: list[AddedToken] = []


def added_tokens(tokenizer: bytes) -> list[AddedToken]:
    """Return the added tokens of a tokenizer, given as the bytes of its tokenizer.json. Raises
    msgspec.MsgspecError if the file is malformed."""
    return msgspec.json.decode(tokenizer, type=_Tokenizer).added_tokens


def with_markers_special(tokenizer: bytes) -> bytes:
    """Return the tokenizer.json with all markers among its added tokens marked as special."""
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
    """Return whether the text starts and ends with punctuation and contains a letter or digit."""
    return (
        bool(text)
        and not any(end.isalnum() or end.isspace() for end in (text[0], text[-1]))
        and any(map(str.isalnum, text))
    )


def divider(markers: Markers) -> Divider:
    """Return a function that splits a text at these markers. Items with odd indexes of its result
    are markers. If several markers match at one place, the longest wins."""
    longest_first = sorted(markers, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"
    return re.compile(f"({pattern})").split
