"""A model's markers: tokens that are no text, by the letters that stand for them.

llguidance takes an added token for a marker if its tokenizer calls it special or if it is written
<like this>; such a token is then only possible where a grammar names it. Some tokenizers add other
markers ("[TOOL_CALLS]") without calling them special: that is corrected here, so that a marker is
never text for us either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

Markers = Mapping[str, int]
"""How a marker is written -> its token id."""


Divider = Callable[[str], list[str]]


class AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Tokenizer(msgspec.Struct):
    added_tokens: list[AddedToken] = []


def added_tokens(tokenizer: bytes) -> list[AddedToken]:
    """Of a tokenizer.json. Raises msgspec.MsgspecError where it is none."""
    return msgspec.json.decode(tokenizer, type=_Tokenizer).added_tokens


def with_markers_special(tokenizer: bytes) -> bytes:
    """The same tokenizer, in which every added token that is a marker is called special."""
    missing = [token for token in added_tokens(tokenizer) if _is_overlooked(token)]
    if not missing:
        return tokenizer
    ids = {token.id for token in missing}
    parts: dict[str, Any] = msgspec.json.decode(tokenizer, type=dict[str, msgspec.Raw])
    tokens: list[dict[str, Any]] = msgspec.json.decode(parts["added_tokens"])
    parts["added_tokens"] = [
        token | {"special": True} if token["id"] in ids else token for token in tokens
    ]
    return msgspec.json.encode(parts)


def _is_overlooked(token: AddedToken) -> bool:
    return not token.special and not _is_angular(token.content) and is_marker(token.content)


def _is_angular(text: str) -> bool:
    return text.startswith("<") and text.endswith(">")


def is_marker(text: str) -> bool:
    """A word between signs; neither a word alone nor signs alone, nor blanks."""
    return (
        bool(text)
        and not any(end.isalnum() or end.isspace() for end in (text[0], text[-1]))
        and any(map(str.isalnum, text))
    )


def divider(markers: Markers) -> Divider:
    """Divides a text at its markers, which then stand at the odd places."""
    longest_first = sorted(markers, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"
    return re.compile(f"({pattern})").split
