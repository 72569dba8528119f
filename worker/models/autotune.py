"""Time of a layer's linears by number of rows, packed and dense, and the choice between them. Pure.

The table of a model is measured on one layer (autotune_cache.py). Times between the measured
numbers of rows are interpolated linearly.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

CLEARLY = 0.6
"""Dense is chosen where it takes no more than this part of packed's time, there and for all more
rows: it takes memory, its calls are many where packed weights are one, and a row's bits are not
the same in every batch any more."""


class RowTime(msgspec.Struct, frozen=True):
    """Seconds of one layer's linears for so many rows; dense_s None: there is no such form."""

    rows: int
    packed_s: float
    dense_s: float | None = None


def dense_from(table: Sequence[RowTime]) -> int | None:
    """The fewest rows from which dense weights win; None where they never do, or are not known.

    `table` by growing rows.
    """
    winning: int | None = None
    for fewer, more in zip([None, *table[:-1]], table, strict=True):
        if not _wins(more):
            winning = None
        elif winning is None:
            winning = more.rows if fewer is None else _crossing(fewer, more)
    return winning


def step_costs(table: Sequence[RowTime], layers: int) -> list[tuple[int, float]]:
    """(rows, seconds of all layers' linears), as the faster form does it. Fewer rows never cost
    more: where it was measured so, something came between."""
    from_rows = dense_from(table)
    least, costs = float("inf"), []
    for time in reversed(table):
        is_dense = from_rows is not None and time.rows >= from_rows
        seconds = time.dense_s if is_dense and time.dense_s is not None else time.packed_s
        least = min(least, seconds * layers)
        costs.append((time.rows, least))
    return costs[::-1]


def in_words(table: Sequence[RowTime]) -> str:
    """As the log says it."""
    winning = dense_from(table)
    if winning is None:
        return "all rows packed"
    if winning <= 1:
        return "all rows dense"
    return f"rows 1-{winning - 1} packed, {winning}+ dense"


def _wins(time: RowTime) -> bool:
    return time.dense_s is not None and time.dense_s <= CLEARLY * time.packed_s


def _crossing(fewer: RowTime, more: RowTime) -> int:
    """The first number of rows behind `fewer` at which dense wins, by straight lines."""
    assert fewer.dense_s is not None
    assert more.dense_s is not None
    for rows in range(fewer.rows + 1, more.rows):
        part = (rows - fewer.rows) / (more.rows - fewer.rows)
        packed = fewer.packed_s + part * (more.packed_s - fewer.packed_s)
        dense = fewer.dense_s + part * (more.dense_s - fewer.dense_s)
        if _wins(RowTime(rows, packed, dense)):
            return rows
    return more.rows
