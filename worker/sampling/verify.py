"""Which of the sampled tokens are the answer's, where guesses at them were computed along.

A token is a function of its logits, parameters, seed and position alone. So at a draft's place the
row simply samples what it would have sampled there without drafts: where that is the draft, the
next place was computed after the right tokens, and counts as well. The first token that is not the
draft is still the answer's own; what was sampled behind it is void. The answer is that of plain
decoding, token for token, for any parameters: nothing is accepted or rejected by chance.

Legend: S sampled places, P rows that sample, T tokens that count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
NO_DRAFT = -1
"""At the last place of a row."""


@dataclass(frozen=True, slots=True)
class VerifiedDrafts:
    """places [T]: indexes into the S; counts [P], >= 1: how many of them each row has."""

    places: Ints
    counts: Ints

    @property
    def last(self) -> Ints:
        """[P] indexes into the T: each row's last token."""
        last: Ints = self.counts.cumsum() - 1
        return last


def verify(tokens: Ints, finite: NDArray[np.bool_], guesses: Ints) -> VerifiedDrafts:
    """tokens, finite, guesses [S]: of each place the token sampled, whether its logits were finite,
    and the draft that the place behind it was computed with (NO_DRAFT at a row's last place)."""
    ends = np.flatnonzero(guesses == NO_DRAFT)
    starts = np.concatenate(([0], ends[:-1] + 1))
    stops = np.flatnonzero((tokens != guesses) | ~finite)  # every row's last place is among them
    counts = stops[np.searchsorted(stops, starts)] + 1 - starts
    first_of = np.repeat(starts - (counts.cumsum() - counts), counts)
    return VerifiedDrafts(first_of + np.arange(len(first_of)), counts)
