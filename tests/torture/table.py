"""Prints the table of a torture program: a row per case, with the case's complaints below it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol


class TableRow(Protocol):
    def cells(self) -> tuple[str, ...]: ...

    def complaints(self, slack: float) -> list[str]: ...


def print_table(columns: Mapping[str, int], rows: Iterable[TableRow], slack: float) -> int:
    """Print each row, and then its complaints, as soon as `rows` yields the row. Return the exit
    code: 1 if there was a complaint.

    columns   title -> width
    slack     factor for all time limits
    """
    widths = list(columns.values())
    num_complaints = 0
    _print_row(columns, widths)
    for row in rows:
        _print_row(row.cells(), widths)
        for complaint in row.complaints(slack):
            num_complaints += 1
            print(f"    BAD: {complaint}", flush=True)
    print(f"{num_complaints} complaints")
    return 1 if num_complaints else 0


def _print_row(cells: Iterable[str], widths: Iterable[int]) -> None:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    print("  ".join(padded), flush=True)
