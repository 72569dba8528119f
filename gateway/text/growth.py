"""A bound on how far a tokenizer can expand a text, computed from its description alone.

`tokenizers` runs what a tokenizer.json describes. A normalizer that replaces "a" with a megabyte,
or thirty that each double it, would fill the memory when a short text is encoded. A decoder of that
kind would do so when an answer is decoded. No tokenizer in use comes near MAX_GROWTH.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

MAX_GROWTH = 64
"""Characters that one character may become. Unicode's own normal forms, at most 18, are not
counted: another pass changes nothing."""
MAX_MAPPED_BYTES = 1_024
"""The longest replacement in SentencePiece's compiled map."""


def check_growth(tokenizer: Mapping[str, Any]) -> None:
    """Raise ValueError if a part of the tokenizer can expand a text too much."""
    for part in ("normalizer", "decoder"):
        if growth_of(tokenizer.get(part)) > MAX_GROWTH:
            raise ValueError(f"its {part} can expand one character to more than {MAX_GROWTH}")


def growth_of(part: Any) -> float:
    """Return how many characters one character can become at most."""
    match part:
        case {"type": "Sequence", "normalizers": list(inner)}:
            return _growth_of_all(inner)
        case {"type": "Sequence", "decoders": list(inner)}:
            return _growth_of_all(inner)
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1.0, len(new) / len(old))
        case {"type": "Replace", "content": str(new)}:  # a pattern may match nothing, everywhere
            return 1.0 + len(new)
        case {"type": "Prepend", "prepend": str(new)}:
            return 1.0 + len(new)
        case {"type": "Precompiled", "precompiled_charsmap": str(text)}:
            return 1.0 if _longest_mapped(text) <= MAX_MAPPED_BYTES else float("inf")
    return 1.0


def _growth_of_all(parts: list[Any]) -> float:
    """Return the growth of parts applied one after another. It stops early once it is infinite."""
    growth = 1.0
    for part in parts:
        growth = min(growth * growth_of(part), 2.0 * MAX_GROWTH)
    return growth


def _longest_mapped(text: str) -> int:
    """Return the longest replacement of a map: trie size in four bytes, the trie, then
    replacements, each ended by NUL.
    """
    try:
        data = base64.b64decode(text)
    except (binascii.Error, ValueError):
        return 0  # it will not load
    rest = data[4 + int.from_bytes(data[:4], "little") :]
    return max(map(len, rest.split(b"\x00")), default=0)
