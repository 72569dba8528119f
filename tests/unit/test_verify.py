"""Which sampled tokens are the answer's, all rows at once, against the same said row by row."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker.sampling.verify import NO_DRAFT, VerifiedDrafts, verify


def row_by_row(rows: list[list[tuple[int, bool, int]]]) -> tuple[list[int], list[int]]:
    """rows: of each place (token, finite, guess). Places and counts, as `verify` tells them."""
    places: list[int] = []
    counts: list[int] = []
    place = 0
    for row in rows:
        count = 1
        for token, finite, guess in row[:-1]:
            if token != guess or not finite:
                break
            count += 1
        places += range(place, place + count)
        counts.append(count)
        place += len(row)
    return places, counts


def verified(rows: list[list[tuple[int, bool, int]]]) -> VerifiedDrafts:
    tokens, finite, guesses = zip(*(place for row in rows for place in row), strict=True)
    return verify(np.array(tokens), np.array(finite), np.array(guesses))


SMALL = st.tuples(st.integers(0, 1), st.sampled_from([True, True, True, False]), st.integers(0, 1))
ROW = st.lists(SMALL, min_size=1, max_size=5).map(
    lambda row: [*row[:-1], (row[-1][0], row[-1][1], NO_DRAFT)]
)


@given(st.lists(ROW, min_size=1, max_size=6))
def test_all_rows_at_once_say_what_each_says_alone(rows: list[list[tuple[int, bool, int]]]) -> None:
    kept = verified(rows)
    assert (kept.places.tolist(), kept.counts.tolist()) == row_by_row(rows)
    assert kept.last.tolist() == [sum(kept.counts[: i + 1]) - 1 for i in range(len(rows))]


def test_nothing_counts_behind_a_place_that_was_not_a_number_though_token_0_was_the_guess() -> None:
    kept = verified([[(7, True, 7), (0, False, 0), (5, True, NO_DRAFT)]])
    assert kept.counts.tolist() == [2]
