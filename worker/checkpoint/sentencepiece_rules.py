"""Checks SentencePiece's table of normalisation rules, the "precompiled charsmap".

Its format is that of `NormalizerSpec.precompiled_charsmap` in sentencepiece_model.proto:

    uint32               bytes of the trie, little-endian
    uint32 * n           the trie, a double array of darts-clone in blocks of 256 units
    the rest             replacements in UTF-8, each ends with a zero byte

The library that normalises texts runs in the gateway, and reads the table without checks: it would
panic on a position outside of it. So a file's table is checked before a gateway gets it.
"""

from __future__ import annotations

import struct

BLOCK = 256
"""Units of a block. The children of a node are in one block."""
IS_VALUE, HAS_VALUE, IS_FAR = 1 << 31, 1 << 8, 1 << 9
"""Bits of a unit: it is a value, and no node; it has a child that is a value; its offset is a
number of blocks."""


def charsmap_error(table: bytes) -> str | None:
    """Return what is wrong with a table; None if every text can be normalised with it."""
    if len(table) < 4:
        return "it is too short"
    (size,) = struct.unpack_from("<I", table)
    if not 0 < size <= len(table) - 4 or size % (4 * BLOCK):
        return f"{size:,} bytes are no size of a trie in {len(table):,} bytes"
    units = struct.unpack_from(f"<{size // 4}I", table, 4)
    replacements = table[4 + size :]
    try:
        replacements.decode()
    except UnicodeDecodeError:
        return "its replacements are not UTF-8"
    for place, unit in enumerate(units):
        if unit & IS_VALUE and place:
            continue
        children = place ^ _offset(unit)
        if children >= len(units):
            return f"unit {place:,} of its trie points outside of the trie"
        if unit & HAS_VALUE and not _starts_character(units[children] & ~IS_VALUE, replacements):
            return f"unit {place:,} of its trie points to no replacement"
    return None


def _offset(unit: int) -> int:
    return (unit >> 10) << (8 if unit & IS_FAR else 0)


def _starts_character(place: int, text: bytes) -> bool:
    """Return whether a character of UTF-8 starts at `place`."""
    return place < len(text) and text[place] & 0xC0 != 0x80
