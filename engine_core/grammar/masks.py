"""One step's masks: which tokens are possible for each constrained row."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from engine_core.grammar.matcher import Matcher
from protocol.arrays import Int32

WORD_BYTES = 4


def fill(matchers: Sequence[Matcher], vocab_size: int) -> Int32:
    """[N, ceil(vocab_size / 32)]. Tens of microseconds a row; the GIL is not held.

    A matcher that fails allows nothing more: its row fails alone, and its `error` says why.
    """
    row_bytes = -(-vocab_size // 32) * WORD_BYTES
    bits = array("i", bytes(row_bytes * len(matchers)))
    address, _ = bits.buffer_info()
    for row, matcher in enumerate(matchers):
        matcher.fill(address + row * row_bytes, row_bytes)
    return Int32(bits, (len(matchers), row_bytes // WORD_BYTES))
