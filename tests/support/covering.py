"""Tables of parameters that are smaller than the product of all axes, for parametrised tests."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import combinations, product
from typing import Any

Row = tuple[Any, ...]
Meeting = tuple[tuple[int, Any], ...]
"""Values that meet in a row: (axis, number of the value)."""


def covering(*axes: Collection[Any], together: int = 2) -> list[Row]:
    """Return rows with one value of each axis. Any `together` values of different axes meet in at
    least one row.

    A fault that needs more than `together` values at once may be missed. The rows are always the
    same, and have the order of the product."""
    every = list(product(*(range(len(axis)) for axis in axes)))
    missing = {meeting for row in every for meeting in _meetings(row, together)}
    chosen: set[Row] = set()
    while missing:
        best = max(every, key=lambda row: sum(each in missing for each in _meetings(row, together)))
        chosen.add(best)
        missing.difference_update(_meetings(best, together))
    values = [list(axis) for axis in axes]
    return [
        tuple(axis[number] for axis, number in zip(values, row, strict=True))
        for row in sorted(chosen)
    ]


def _meetings(row: Row, together: int) -> Iterator[Meeting]:
    return combinations(enumerate(row), together)
