"""Computes the token masks of one step: bit masks of the tokens that grammars and budgets allow."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from engine_core.grammar.matcher import Matcher
from protocol.wire.arrays import Int32

WORD_BYTES = 4


def compute_masks(matchers: Sequence[Matcher | None], vocab_size: int) -> Int32:
    """Return the masks [N, ceil(vocab_size / 32)], one row per matcher.

    Bit t % 32 of word t // 32 is token t. None instead of a matcher allows every token. A matcher
    that fails allows no token, so its row of the step fails, and the matcher's `error` gives the
    reason. A row takes tens of microseconds, during which the GIL is released.
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
        matcher.write_mask(address + start, row_bytes)
        if matcher.forced is not None:
            _leave_only(rows[start : start + row_bytes], matcher.forced, always=matcher.is_free)
    return Int32(bits, (len(matchers), row_bytes // WORD_BYTES))


def _leave_only(bits: memoryview, token: int, *, always: bool) -> None:
    """Clear all bits except that of `token`.

    If the bit of `token` is not set, nothing is cleared unless `always` is true.
    """
    place, bit = token >> 3, 1 << (token & 7)
    if always or bits[place] & bit:
        bits[:] = bytes(len(bits))
        bits[place] = bit
