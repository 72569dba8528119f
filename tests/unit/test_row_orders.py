"""Orders of rows that differ between a file and the model."""

from __future__ import annotations

import numpy as np
import pytest

from worker.spec.tensor_names import RowOrder, interleaved

ORDERS = [
    RowOrder((3, 2, 5), (1, 0, 2)),
    RowOrder((2, 3, 4), (0, 2, 1)),
    interleaved(3, 8),
    interleaved(3, 4, 6),
    interleaved(1, 2, 1),
]


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_and_its_inverse_have_each_row_once(order: RowOrder) -> None:
    count = order.shape[0] * (int(np.prod(order.shape[1:])) + order.kept)
    there, back = order.file_rows_of(count), order.model_rows_of(count)
    assert sorted(there) == sorted(back) == [*range(count)]
    assert [there[row] for row in back] == [back[row] for row in there] == [*range(count)]


@pytest.mark.parametrize("order", [order for order in ORDERS if not order.kept])
def test_an_order_is_a_reshape_and_a_transposition(order: RowOrder) -> None:
    rows = np.arange(np.prod(order.shape))
    wanted = rows.reshape(order.shape).transpose(order.axes).reshape(-1)
    assert order.file_rows_of(len(rows)) == wanted.tolist()


def test_kept_rows_stay_behind_those_of_their_head() -> None:
    assert interleaved(2, 4, 2).file_rows_of(12) == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


def test_an_order_is_for_tensors_of_its_size_only() -> None:
    with pytest.raises(AssertionError, match="an order of 24 rows for 23"):
        interleaved(3, 8).file_rows_of(23)
