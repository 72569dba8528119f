"""Blocks cut into chunks: both ends count them alike.

Legend: R rows of a cache (each layer's keys, then each layer's values), B blocks, P bytes of a
block in one row (a piece).
"""

from __future__ import annotations

from typing import NamedTuple


class Cut(NamedTuple):
    """Pieces [first_row, end_row) x [first, end): of the blocks in question, by index."""

    first_row: int
    end_row: int
    first: int
    end: int

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, blocks]"""
        return self.end_row - self.first_row, self.end - self.first


class Cuts:
    """All chunks of `num_blocks` blocks: whole blocks as far as a chunk holds one, else rows of one
    block; at most `most_bytes` each, but at least a piece."""

    def __init__(
        self, *, num_rows: int, piece_bytes: int, num_blocks: int, most_bytes: int
    ) -> None:
        pieces = max(1, most_bytes // piece_bytes)
        self._num_rows, self._num_blocks = num_rows, num_blocks
        self._rows = min(pieces, num_rows)
        self._blocks = max(1, pieces // num_rows)
        self._per_block = -(-num_rows // self._rows)  # 1 where a chunk holds whole blocks

    def __len__(self) -> int:
        return self._per_block * -(-self._num_blocks // self._blocks)

    def __getitem__(self, chunk: int) -> Cut:
        """Raises IndexError beyond the last."""
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
