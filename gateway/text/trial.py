"""A trial of a model's tokenizer before it is used.

The trial encodes and decodes an ordinary text, and texts on which a badly written tokenizer fails
or is slow. It runs in a process with limits on time and memory, because the tokenizer.json is not
trusted yet.

The library `tokenizers` does whatever a tokenizer.json describes. A normalizer that replaces "a"
with a megabyte, or thirty normalizers that each double the text, would fill the memory when a short
text is encoded. A similar decoder would fill it when an answer is decoded. So before the trial, the
most that a text can grow is computed from the description alone. The tokenizer is refused if this
exceeds MAX_GROWTH. Tokenizers in use are far below that.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import tokenizers

SIZES = (500, 1_000, 4_000)
"""Lengths of the trial texts in characters, in increasing order. If the time grows with the cube of
the length, a short text shows it before a long one takes minutes."""
MAX_CPU_S = 0.5
"""CPU time limit to encode and decode a text. The slowest tokenizer in use takes a few ms."""
_CHARS = "".join(map(chr, range(32, 127)))
USUAL = "Hello, world! It's 12:30.\n\n\tdef f(x): return x  # \u00e9\u8a9e\U0001f44d"
RUNS = ("a", "A", " ", "\n", "0", ".", "\u8a9e", _CHARS, "ab", "a ", " \n", "1.", "'s")
"""Strings that are repeated to make trial texts. Long repetitions make a badly written pattern
slow, above all if another character follows them."""
ENDS = ("", "!", "x")
"""Characters after the repetitions."""


def run_trial(text: str) -> None:
    """Try the tokenizer.json in `text`. Raises ValueError with the reason if it cannot be used."""
    described = json.loads(text)
    if not isinstance(described, dict):
        raise ValueError("tokenizer.json must be a JSON object")
    check_growth(described)
    try:
        inner = tokenizers.Tokenizer.from_str(text)
        inner.no_truncation()
        inner.no_padding()
        for probe in _probes():
            started_at = time.process_time()
            inner.decode(inner.encode(probe).ids)
            if time.process_time() - started_at > MAX_CPU_S:
                raise ValueError(f"it takes too long for texts like {probe[:8]!r}")
    except BaseException as error:  # a panic in Rust is not derived from Exception
        raise ValueError(str(error)) from None


def _probes() -> Iterator[str]:
    """Yield the trial texts, short ones first."""
    yield USUAL
    for size in SIZES:
        for run, end in product(RUNS, ENDS):
            yield (run * size)[:size] + end


# ---- growth

MAX_GROWTH = 64
"""Maximum number of characters that one character may become. Unicode's normal forms are not
counted: they make at most 18 characters of one, and applying them again changes nothing."""
MAX_MAPPED_BYTES = 1_024
"""Longest replacement that is allowed in SentencePiece's compiled map."""


def check_growth(tokenizer: Mapping[str, Any]) -> None:
    """Raise ValueError if the normalizer or the decoder of a parsed tokenizer.json can make more
    than MAX_GROWTH characters of one."""
    for part in ("normalizer", "decoder"):
        if growth_of(tokenizer.get(part)) > MAX_GROWTH:
            raise ValueError(f"its {part} can expand one character to more than {MAX_GROWTH}")


def growth_of(part: Any) -> float:
    """Return an upper bound on the number of characters that a part outputs per input character.

    part  the JSON description of a normalizer or decoder
    """
    match part:
        case {"type": "Sequence", "normalizers": list(inner)}:
            return _growth_of_all(inner)
        case {"type": "Sequence", "decoders": list(inner)}:
            return _growth_of_all(inner)
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1.0, len(new) / len(old))
        case {"type": "Replace", "content": str(new)}:
            return 1.0 + len(new)  # the pattern may match the empty string between all characters
        case {"type": "Prepend", "prepend": str(new)}:
            return 1.0 + len(new)
        case {"type": "Precompiled", "precompiled_charsmap": str(text)}:
            return 1.0 if _longest_mapped(text) <= MAX_MAPPED_BYTES else float("inf")
    return 1.0


def _growth_of_all(parts: list[Any]) -> float:
    """Return a bound on the growth by several parts that are applied one after another.

    The bound is capped at a number above MAX_GROWTH, so that the product never overflows.
    """
    growth = 1.0
    for part in parts:
        growth = min(growth * growth_of(part), 2.0 * MAX_GROWTH)
    return growth


def _longest_mapped(text: str) -> int:
    """Return the length in bytes of the longest replacement in SentencePiece's compiled map.

    The map is base64. It has the size of a trie in four bytes, the trie, and the replacements, each
    of which ends with NUL.
    """
    try:
        data = base64.b64decode(text)
    except (binascii.Error, ValueError):
        return 0  # `tokenizers` will refuse to load the map
    rest = data[4 + int.from_bytes(data[:4], "little") :]
    return max(map(len, rest.split(b"\x00")), default=0)
