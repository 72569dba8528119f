"""Tokens that were sampled after a wrong draft are left out when a step is read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from worker.batch.pending_step import SampledTokens
from worker.device.logprob_columns import LogprobColumns
from worker.sampling.verify import NO_DRAFT, verify

DRAFTS = np.array([4, 9, NO_DRAFT, NO_DRAFT, 7, 3, 2, NO_DRAFT, 6, NO_DRAFT])
"""The drafts of four rows. The places of all but the second row report logprobs."""
TOKENS = np.array([4, 1, 5, 8, 7, 3, 5, 0, 6, 2])
REPORTED = np.array([0, 1, 2, 4, 5, 6, 7, 8, 9])
BOTH = np.array([3, 4, 5, 6])
"""Indexes into REPORTED: the third row's places report both distributions."""


def sampled() -> SampledTokens:
    """Return the result at all places. Each number of a column names its place."""
    ends = np.flatnonzero(DRAFTS == NO_DRAFT) + 1
    kept = verify(TOKENS, np.ones(len(TOKENS), bool), DRAFTS)
    numbers = torch.from_numpy(REPORTED)
    wide = numbers[:, None].float() + torch.tensor([0.0, 0.25])
    columns = LogprobColumns(
        rows=REPORTED,
        counts=REPORTED + 10,
        possible=numbers + 20,
        ids=torch.from_numpy(TOKENS)[numbers],
        logprobs=numbers / 2,
        ranks=numbers + 30,
        top_ids=wide.long(),
        top_logprobs=wide,
        asked_counts=REPORTED + 40,
        asked=wide * 2,
        drawn_at=BOTH,
        drawn=numbers[BOTH][:, None] + 0.5,
    )
    return SampledTokens(
        torch.from_numpy(TOKENS),
        torch.ones(4, dtype=torch.bool),
        torch.from_numpy(kept.counts),
        columns,
        np.append(0, ends[:-1]),
    )


def test_only_tokens_of_the_answers_remain() -> None:
    found = sampled().without_wrong()
    assert found.tokens.tolist() == [4, 1, 8, 7, 3, 5, 6, 2]
    assert found.counts.tolist() == [2, 1, 3, 2]
    assert found.starts is None


def test_logprobs_of_the_remaining_tokens_are_renumbered() -> None:
    places = [0, 1, 4, 5, 6, 8, 9]
    found = sampled().without_wrong().logprobs
    assert found.rows.tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert found.ids.tolist() == TOKENS[places].tolist()
    assert found.counts.tolist() == [place + 10 for place in places]
    assert found.possible.tolist() == [place + 20 for place in places]
    assert found.ranks.tolist() == [place + 30 for place in places]
    assert found.asked_counts.tolist() == [place + 40 for place in places]
    assert found.logprobs.tolist() == [place / 2 for place in places]
    assert found.top_logprobs.tolist() == [[place, place + 0.25] for place in places]
    assert found.asked.tolist() == [[2 * place, 2 * place + 0.5] for place in places]
    assert found.drawn_at.tolist() == [2, 3, 4]
    assert found.drawn.tolist() == [[4.5], [5.5], [6.5]]


@pytest.mark.parametrize("starts", [None, np.array([0, 3, 4, 8])])
def test_a_result_without_drafts_is_left_as_it_is(starts: np.ndarray | None) -> None:
    whole = sampled()
    plain = SampledTokens(whole.tokens, whole.finite, None, whole.logprobs, starts)
    assert plain.without_wrong() is plain
