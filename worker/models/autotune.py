"""Time of a layer's linears by number of rows, packed and dense, and the choice between them. Pure.

The table of a model is measured on one layer (autotune_cache.py). Times between the measured
numbers of rows are interpolated linearly.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

CLEARLY = 0.6
"""Dense weights are used from a number of rows on if they take at most this part of the time of
packed ones, there and for all larger numbers. They must win clearly: they take memory, need many
calls instead of one, and make a row's bits depend on its batch."""


class RowTime(msgspec.Struct, frozen=True):
    """Seconds of one layer's linears for `rows` rows. `dense_s` is None without dense weights."""

    rows: int
    packed_s: float
    dense_s: float | None = None


def dense_from(table: Sequence[RowTime]) -> int | None:
    """Return the fewest rows from which dense weights win; None if they never do.

    `table` is sorted by rows.
    """
    winning: int | None = None
    for fewer, more in zip([None, *table[:-1]], table, strict=True):
        if not _wins(more):
            winning = None
        elif winning is None:
            winning = more.rows if fewer is None else _crossing(fewer, more)
    return winning


def step_costs(table: Sequence[RowTime], layers: int) -> list[tuple[int, float]]:
    """Return (rows, seconds of all layers' linears) with the faster form.

    Fewer rows never cost more than more rows: such a measurement was disturbed, and is corrected.
    """
    from_rows = dense_from(table)
    least, costs = float("inf"), []
    for time in reversed(table):
        is_dense = from_rows is not None and time.rows >= from_rows
        seconds = time.dense_s if is_dense and time.dense_s is not None else time.packed_s
        least = min(least, seconds * layers)
        costs.append((time.rows, least))
    return costs[::-1]


def in_words(table: Sequence[RowTime]) -> str:
    """Return the choice in words, for the log."""
    winning = dense_from(table)
    if winning is None:
        return "all rows packed"
    if winning <= 1:
        return "all rows dense"
    return f"rows 1-{winning - 1} packed, {winning}+ dense"


def _wins(time: RowTime) -> bool:
    return time.dense_s is not None and time.dense_s <= CLEARLY * time.packed_s


def _crossing(fewer: RowTime, more: RowTime) -> int:
    """Return the first number of rows after `fewer` at which dense wins, interpolated linearly."""
    assert fewer.dense_s is not None
    assert more.dense_s is not None
    for rows in range(fewer.rows + 1, more.rows):
        part = (rows - fewer.rows) / (more.rows - fewer.rows)
        packed = fewer.packed_s + part * (more.packed_s - fewer.packed_s)
        dense = fewer.dense_s + part * (more.dense_s - fewer.dense_s)
        if _wins(RowTime(rows, packed, dense)):
            return rows
    return more.rows
