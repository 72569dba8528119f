"""Division of blocks into chunks, computed identically at both ends.

Legend: R rows of a cache (each layer's keys, then each layer's values), B blocks, P bytes of a
block in one row (a piece).
"""

from __future__ import annotations

from typing import NamedTuple


class Cut(NamedTuple):
    """Pieces [first_row, end_row) x [first, end) of the transferred blocks, by index."""

    first_row: int
    end_row: int
    first: int
    end: int

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, blocks]"""
        return self.end_row - self.first_row, self.end - self.first


class Cuts:
    """All chunks of `num_blocks` blocks. A chunk holds whole blocks if at least one fits, otherwise
    rows of one block. It has at most `max_bytes`, but at least one piece."""

    def __init__(self, *, num_rows: int, piece_bytes: int, num_blocks: int, max_bytes: int) -> None:
        pieces = max(1, max_bytes // piece_bytes)
        self._num_rows, self._num_blocks = num_rows, num_blocks
        self._rows = min(pieces, num_rows)
        self._blocks = max(1, pieces // num_rows)
        self._per_block = -(-num_rows // self._rows)  # 1 if a chunk holds whole blocks

    def __len__(self) -> int:
        return self._per_block * -(-self._num_blocks // self._blocks)

    def __getitem__(self, chunk: int) -> Cut:
        """Return the chunk. Raises IndexError after the last."""
        if not 0 <= chunk < len(self):
            raise IndexError(f"chunk {chunk} of {len(self)}")
        group, part = divmod(chunk, self._per_block)
        row, block = part * self._rows, group * self._blocks
        return Cut(
            row,
            min(row + self._rows, self._num_rows),
            block,
            min(block + self._blocks, self._num_blocks),
        )
