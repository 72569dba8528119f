"""A trial of a tokenizer, with ordinary texts and with texts on which a bad one fails or is slow.

It runs in a process with limits of time and memory, because a tokenizer.json is not trusted yet.

`tokenizers` runs what a tokenizer.json describes. A normalizer that replaces "a" with a megabyte,
or thirty that each double it, would fill the memory when a short text is encoded. A decoder of that
kind would do so when an answer is decoded. So before the trial the description alone gives a bound
on how far a text can expand. No tokenizer in use comes near MAX_GROWTH.
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
"""In characters. Cubic growth is found at a small size, before a text takes minutes."""
MAX_CPU_S = 0.5
"""CPU time limit to encode and decode a text. The slowest tokenizer in use takes a few ms."""
_CHARS = "".join(map(chr, range(32, 127)))
USUAL = "Hello, world! It's 12:30.\n\n\tdef f(x): return x  # \u00e9\u8a9e\U0001f44d"
RUNS = ("a", "A", " ", "\n", "0", ".", "\u8a9e", _CHARS, "ab", "a ", " \n", "1.", "'s")
"""Long runs and alternations make a badly written pattern slow, above all if another character
follows them."""
ENDS = ("", "!", "x")


def run_trial(text: str) -> None:
    """Try the tokenizer.json in `text`. Raise ValueError with the reason if it is unusable."""
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
    except BaseException as error:  # a panic of Rust's is no Exception
        raise ValueError(str(error)) from None


def _probes() -> Iterator[str]:
    yield USUAL
    for size in SIZES:
        for run, end in product(RUNS, ENDS):
            yield (run * size)[:size] + end


# ---- growth

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
