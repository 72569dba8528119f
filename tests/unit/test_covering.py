"""Tables of parameters in which the values of different axes meet."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.covering import covering

AXES = ["abcde", [1, 2, 3], [None, True], [False, True]]


@pytest.mark.parametrize("together", [1, 2, 3, 4])
def test_any_values_of_different_axes_meet_in_a_row(together: int) -> None:
    rows = covering(*AXES, together=together)
    assert rows == [row for row in product(*AXES) if row in rows]
    for some in combinations(range(len(AXES)), together):
        met = {tuple(row[axis] for axis in some) for row in rows}
        assert met == {*product(*(AXES[axis] for axis in some))}


@pytest.mark.parametrize(("together", "number"), [(1, 5), (2, 15), (3, 30), (4, 60)])
def test_a_table_is_as_short_as_its_largest_axes_permit(together: int, number: int) -> None:
    assert len(covering(*AXES, together=together)) == number


def test_two_axes_are_multiplied() -> None:
    assert covering("ab", [1, 2]) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
