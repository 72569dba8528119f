"""Verifies drafts: finds which of the sampled tokens belong to the answers.

A sampled token depends only on its logits, parameters, seed and position. So at a draft's place the
row samples exactly what it would have sampled without drafts. If that token equals the draft, the
next place was computed from correct tokens, and its sample counts too. The first sample that
differs from its draft still belongs to the answer; the samples after it are discarded. The answer
equals plain decoding token for token, for any parameters: there is no random acceptance.

Legend: S sampled places, P rows that sample, T tokens that count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
NO_DRAFT = -1
"""Stands for the draft at the last place of a row, which has none."""


@dataclass(frozen=True, slots=True)
class VerifiedDrafts:
    """The sampled tokens that belong to the answers.

    places   [T] their indexes among the S sampled places
    counts   [P] number of tokens of each row, at least 1
    """

    places: Ints
    counts: Ints

    @property
    def last(self) -> Ints:
        """Return the index [P] into `places` of each row's last token."""
        last: Ints = self.counts.cumsum() - 1
        return last


def verify(tokens: Ints, finite: NDArray[np.bool_], drafts: Ints) -> VerifiedDrafts:
    """Return the places whose tokens belong to the answers.

    tokens, finite [S]   the token sampled at each place, and whether its logits were finite
    drafts [S]           the draft from which the next place was computed; NO_DRAFT at the last
                         place of a row
    """
    ends = np.flatnonzero(drafts == NO_DRAFT)
    starts = np.concatenate(([0], ends[:-1] + 1))
    stops = np.flatnonzero((tokens != drafts) | ~finite)  # contains the last place of every row
    counts = stops[np.searchsorted(stops, starts)] + 1 - starts
    offsets = np.repeat(starts - (counts.cumsum() - counts), counts)
    return VerifiedDrafts(offsets + np.arange(len(offsets)), counts)
