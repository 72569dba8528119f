"""Chooses between packed and dense weights from measured times. Does no I/O.

A model's table holds the times of one layer's linears (autotune_cache.py). Times between the
measured numbers of rows are interpolated linearly.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

CLEARLY = 0.6
"""Dense weights are used for N and more rows if, for each of these numbers of rows, they take at
most this fraction of the time of packed weights. The gain must be large, because dense weights need
more memory and many calls instead of one, and make a row's bits depend on its batch."""


class RowTime(msgspec.Struct, frozen=True):
    """Seconds that the linears of one layer take for `rows` rows, in each form of the weights."""

    rows: int
    packed_s: float
    #: None if only packed weights were measured.
    dense_s: float | None = None


def dense_from(table: Sequence[RowTime]) -> int | None:
    """Return the least number of rows from which dense weights are always clearly faster (CLEARLY).
    Return None if they are not clearly faster at the largest measured number, or were not measured.

    table   sorted by rows
    """
    winning: int | None = None
    for fewer, more in zip([None, *table[:-1]], table, strict=True):
        if not _wins(more):
            winning = None
        elif winning is None:
            winning = more.rows if fewer is None else _crossing(fewer, more)
    return winning


def step_costs(table: Sequence[RowTime], layers: int) -> list[tuple[int, float]]:
    """Return (rows, seconds) for each table entry. The seconds are those of the linears of all
    `layers` layers, in the form that `dense_from` selects for that number of rows.

    If fewer rows took longer than more rows, the measurement was disturbed, and the shorter time
    is used.
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
    """Return the choice between packed and dense weights as a text for the log."""
    winning = dense_from(table)
    if winning is None:
        return "all rows packed"
    if winning <= 1:
        return "all rows dense"
    return f"rows 1-{winning - 1} packed, {winning}+ dense"


def _wins(time: RowTime) -> bool:
    return time.dense_s is not None and time.dense_s <= CLEARLY * time.packed_s


def _crossing(fewer: RowTime, more: RowTime) -> int:
    """Return the least number of rows above `fewer.rows` for which dense weights win.

    Times between the two measurements are interpolated linearly.
    """
    assert fewer.dense_s is not None
    assert more.dense_s is not None
    for rows in range(fewer.rows + 1, more.rows):
        part = (rows - fewer.rows) / (more.rows - fewer.rows)
        packed = fewer.packed_s + part * (more.packed_s - fewer.packed_s)
        dense = fewer.dense_s + part * (more.dense_s - fewer.dense_s)
        if _wins(RowTime(rows, packed, dense)):
            return rows
    return more.rows
