"""One step's masks: which tokens are possible for each constrained row."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from engine_core.grammar.matcher import Matcher
from protocol.arrays import Int32

WORD_BYTES = 4


def fill(matchers: Sequence[Matcher | None], vocab_size: int) -> Int32:
    """[N, ceil(vocab_size / 32)]. Tens of microseconds a row; the GIL is not held. None: every
    token is possible.

    A matcher that fails allows nothing more: its row fails alone, and its `error` says why.
    """
    row_bytes = -(-vocab_size // 32) * WORD_BYTES
    bits = array("i", bytes(row_bytes * len(matchers)))
    address, _ = bits.buffer_info()
    rows = memoryview(bits).cast("B")
    for row, matcher in enumerate(matchers):
        start = row * row_bytes
        if matcher is None:
            rows[start : start + row_bytes] = b"\xff" * row_bytes
            continue
        matcher.fill(address + start, row_bytes)
        if matcher.forced is not None:
            _leave_only(rows[start : start + row_bytes], matcher.forced, always=matcher.is_free)
    return Int32(bits, (len(matchers), row_bytes // WORD_BYTES))


def _leave_only(bits: memoryview, token: int, *, always: bool) -> None:
    """No token but this one; unless the grammar does not admit it."""
    place, bit = token >> 3, 1 << (token & 7)
    if always or bits[place] & bit:
        bits[:] = bytes(len(bits))
        bits[place] = bit
