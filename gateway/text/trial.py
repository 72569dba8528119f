"""A trial of a tokenizer, with ordinary texts and with texts on which a bad one fails or is slow.

It runs in a process with limits of time and memory, because a tokenizer.json is not trusted yet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import product

import tokenizers

from gateway.text.growth import check_growth

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
