"""The interface through which a worker step samples tokens from logits.

Legend: S sampled places, P rows that sample, V vocabulary, N scored tokens.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from worker.batch.batch import Ints, Sampled
from worker.batch.pending_step import SampledTokens
from worker.sampling.bans import RowMasks
from worker.sampling.logprobs import Scores
from worker.slots.table import SlotTable


class Sampling(Protocol):
    """Samples the tokens of a step. It holds no state of any request.

    All implementations follow the rules of sampler.py, logits.py, logprobs.py and verify.py, and
    all sums over the vocabulary are sums of integers. So a row's result depends on no other row,
    and not on how its work is divided. The integers are made of exponentials that have the same
    bits everywhere (exact_probs.py). So all implementations choose the same token.
    """

    def sample(
        self,
        logits: Tensor,
        slots: SlotTable,
        sampled: Sampled,
        *,
        masks: RowMasks | None = None,
        drafts: Ints | None = None,
    ) -> SampledTokens:
        """Sample a token at each place, and append the tokens that belong to the answers to the
        slots.

        logits   [S, V] float32; may be overwritten
        drafts   [S] the draft that each place must verify, see BatchRows; None: the plan has none
        """
        ...

    def score(self, logits: Tensor, tokens: Tensor, num_top: int) -> Scores:
        """Return the scores of tokens [N] int64 under logits [N, V] float32, in which banned tokens
        are -inf. `num_top` is at most MAX_LOGPROBS."""
        ...
