"""Chooses between packed and dense weights from measured times. Does no I/O.

A model's table holds the times of one layer's linears (autotune_cache.py). Times between the
measured numbers of rows are interpolated linearly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

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


def distinct_experts(num_experts: int, top_k: int, rows: int) -> float:
    """Return the expected number of different experts that `rows` rows choose, if each row chooses
    `top_k` of them and no expert is more likely than another."""
    return num_experts * (1 - (1 - top_k / num_experts) ** rows)


def mixture_costs(
    expert: Sequence[RowTime],
    others: Sequence[RowTime],
    *,
    num_experts: int,
    top_k: int,
    mixtures: int,
    layers: int,
) -> list[tuple[int, float]]:
    """Return (rows, seconds) for each table entry, of the linears of all layers of a model with
    mixtures of experts. More rows read more experts, until all are read.

    expert, others      times of the linears of one expert, and of a layer's linears besides those
                        of experts, for the same numbers of rows
    num_experts, top_k  experts of a layer, and how many of them a row chooses
    mixtures, layers    number of layers with experts, and of all layers
    """
    costs = []
    for time in others:
        chosen = distinct_experts(num_experts, top_k, time.rows)
        of_experts = chosen * _interpolated(expert, time.rows * top_k / chosen)
        costs.append((time.rows, layers * time.packed_s + mixtures * of_experts))
    least = list(accumulate((cost for _, cost in reversed(costs)), min))[::-1]
    return [(rows, cost) for (rows, _), cost in zip(costs, least, strict=True)]


def _interpolated(table: Sequence[RowTime], rows: float) -> float:
    """Return the time of packed weights for a number of rows, which need not be whole."""
    right = min(bisect_left(table, rows, key=lambda time: time.rows), len(table) - 1)
    if not right or rows >= table[right].rows:
        return table[right].packed_s
    fewer, more = table[right - 1], table[right]
    part = (rows - fewer.rows) / (more.rows - fewer.rows)
    return fewer.packed_s + part * (more.packed_s - fewer.packed_s)


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
