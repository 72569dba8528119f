"""Verification of drafts: which of the sampled tokens belong to the answers.

A token is a function of its logits, parameters, seed and position only. So at a draft's place the
row samples exactly what it would have sampled without drafts. If that token equals the draft, the
next place was computed from correct tokens, and its sample counts too. The first sample that
differs from its draft still belongs to the answer; samples after it are discarded. The answer
equals plain decoding token for token, for any parameters: there is no random acceptance.

Legend: S sampled places, P rows that sample, T tokens that count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
NO_DRAFT = -1
"""The draft at the last place of a row."""


@dataclass(frozen=True, slots=True)
class VerifiedDrafts:
    """places [T] index the S sampled places; counts [P], >= 1, are the tokens of each row."""

    places: Ints
    counts: Ints

    @property
    def last(self) -> Ints:
        """[P] indexes into the T: the last token of each row."""
        last: Ints = self.counts.cumsum() - 1
        return last


def verify(tokens: Ints, finite: NDArray[np.bool_], drafts: Ints) -> VerifiedDrafts:
    """Return the places whose tokens belong to the answers.

    tokens, finite [S]   the token sampled at each place, and whether its logits were finite
    drafts [S]           the draft from which the next place was computed; NO_DRAFT at the last
    """
    ends = np.flatnonzero(drafts == NO_DRAFT)
    starts = np.concatenate(([0], ends[:-1] + 1))
    stops = np.flatnonzero((tokens != drafts) | ~finite)  # contains the last place of every row
    counts = stops[np.searchsorted(stops, starts)] + 1 - starts
    first_of = np.repeat(starts - (counts.cumsum() - counts), counts)
    return VerifiedDrafts(first_of + np.arange(len(first_of)), counts)
