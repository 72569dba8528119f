"""Packed or dense, by rows: the choice, what a step then costs, and the file that remembers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from worker.layers.linear import Dense
from worker.models.autotune import RowTime, dense_from, in_words, step_costs
from worker.models.autotune_cache import ROWS, row_times


def table(*times: tuple[int, float, float | None]) -> list[RowTime]:
    return [RowTime(*time) for time in times]


CROSSING = table((1, 1, 2), (8, 2, 2.8), (16, 8, 2.8), (32, 16, 4))
PACKED = table((1, 1, 2), (8, 2, 3), (16, 4, 4))
DENSE = table((1, 4, 1), (8, 9, 2))
"""A form that wins by little is not chosen; nor is one that wins for some rows and not for more."""
BARELY = table((1, 1, 0.9), (8, 2, 1.9))
ONCE = table((1, 1, 0.1), (8, 2, 3), (16, 4, 4))
ALONE = table((1, 1, None), (8, 2, None))


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (PACKED, "all rows packed"),
        (BARELY, "all rows packed"),
        (ONCE, "all rows packed"),
        (ALONE, "all rows packed"),
        (DENSE, "all rows dense"),
        (CROSSING, "rows 1-11 packed, 12+ dense"),
    ],
)
def test_dense_weights_serve_from_where_they_clearly_win_on(
    times: list[RowTime], words: str
) -> None:
    """At 11 of the crossing table packed takes 4.25, at 12 it takes 5, dense 2.8."""
    assert in_words(times) == words
    assert (dense_from(times) is None) == (words == "all rows packed")


def test_a_step_costs_what_the_faster_form_takes_in_all_layers() -> None:
    assert step_costs(CROSSING, layers=10) == [(1, 10), (8, 20), (16, 28), (32, 40)]


def test_fewer_rows_never_cost_more() -> None:
    """A turn in which something else happened."""
    times = table((1, 9, None), (2, 3, None), (4, 5, None))
    assert step_costs(times, layers=1) == [(1, 3), (2, 3), (4, 5)]


class CountedLinear(Dense):
    """A linear that counts its calls."""

    def __init__(self) -> None:
        super().__init__(torch.ones(2, 4))
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().__call__(x)


def measured(linear: CountedLinear, folder: Path | None, of: str = "this machine") -> list[RowTime]:
    dense, x = Dense(torch.ones(2, 4)), torch.ones(256, 4)
    return row_times([of], [linear], lambda: [dense], [x], folder)


def test_what_was_measured_is_found_again(tmp_path: Path) -> None:
    first, again, elsewhere = CountedLinear(), CountedLinear(), CountedLinear()
    told = measured(first, tmp_path / "deep" / "er")
    assert [time.rows for time in told] == list(ROWS)
    assert all(time.packed_s > 0 and (time.dense_s or 0) > 0 for time in told)
    assert measured(again, tmp_path / "deep" / "er") == told
    measured(elsewhere, tmp_path / "deep" / "er", "another machine")
    assert (first.calls > 0, again.calls, elsewhere.calls > 0) == (True, 0, True)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"of":["this machine"],"table":[]}', b"\xff"])
def test_a_damaged_file_is_measured_anew_and_written_again(tmp_path: Path, content: bytes) -> None:
    told = measured(CountedLinear(), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    anew, last = CountedLinear(), CountedLinear()
    again = measured(anew, tmp_path)
    assert [time.rows for time in again] == [time.rows for time in told]
    assert measured(last, tmp_path) == again
    assert (anew.calls > 0, last.calls) == (True, 0)


def test_where_nothing_can_be_kept_all_is_measured(tmp_path: Path) -> None:
    taken = tmp_path / "a file"
    taken.touch()
    for folder in (None, taken / "below"):
        assert len(measured(CountedLinear(), folder)) == len(ROWS)
