"""Samples the tokens of a step with torch. This is the reference of the other implementations, and
is used if there are no kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.batch.batch import Ints, Sampled
from worker.batch.pending_step import SampledTokens
from worker.device.staging import upload
from worker.sampling.bans import RowMasks
from worker.sampling.logits import process_logits
from worker.sampling.logprobs import Scores, sampled_logprobs, score
from worker.sampling.mirostat import SurpriseLimits, limit_surprise
from worker.sampling.sampler import TokenChoice, sample
from worker.sampling.verify import verify
from worker.slots.table import SlotTable


class TorchSampling:
    """Samples with torch, see `Sampling` in base.py."""

    def sample(
        self,
        logits: Tensor,
        slots: SlotTable,
        sampled: Sampled,
        *,
        masks: RowMasks | None = None,
        drafts: Ints | None = None,
    ) -> SampledTokens:
        """Sample a token at each place. With drafts, this waits for the device."""
        processed = process_logits(logits, slots, sampled, masks)
        limits = limit_surprise(processed, slots, sampled)
        choice = sample(processed, slots, sampled)
        return finished(logits, processed, choice, slots, sampled, drafts, limits)

    def score(self, logits: Tensor, tokens: Tensor, num_top: int) -> Scores:
        return score(logits, tokens, num_top)


def finished(
    logits: Tensor,
    processed: Tensor,
    choice: TokenChoice,
    slots: SlotTable,
    sampled: Sampled,
    drafts: Ints | None,
    limits: SurpriseLimits | None,
) -> SampledTokens:
    """Append the chosen tokens to their slots, and return them with what requests want to know of
    them. With drafts, only tokens that belong to the answers are kept."""
    if drafts is not None:
        return verified(logits, processed, choice, slots, sampled, drafts, limits)
    slots.append_tokens(sampled.slots, sampled.known, choice.tokens)
    mu = None
    if limits is not None:
        mu = limits.advance(processed, choice.tokens, slots, sampled)
    logprobs = sampled_logprobs(logits, processed, choice.tokens, slots, sampled)
    return SampledTokens(choice.tokens, choice.finite, None, logprobs, mu=mu)


def verified(
    logits: Tensor,
    processed: Tensor,
    choice: TokenChoice,
    slots: SlotTable,
    sampled: Sampled,
    drafts: Ints,
    limits: SurpriseLimits | None,
) -> SampledTokens:
    """Verify the drafts, and return the sampled tokens that belong to the answers. The last one of
    each row is appended to its slot. The others equal their drafts, which are in the slot already.
    """
    tokens, finite = choice.tokens.cpu().numpy(), choice.finite.cpu().numpy()
    verified = verify(tokens, finite, drafts)
    last_places = verified.places[verified.last]
    index, last = upload([verified.places, last_places], slots.device)
    ends = sampled.subset(last_places)
    slots.append_tokens(ends.slots, ends.known, choice.tokens.index_select(0, last))
    mu = None
    if limits is not None:
        mu = limits.advance(processed, choice.tokens, slots, sampled, (last_places, last))
    logits, processed, verified_tokens = (
        tensor.index_select(0, index) for tensor in (logits, processed, choice.tokens)
    )
    places = sampled.subset(verified.places)
    return SampledTokens(
        verified_tokens,
        choice.finite.index_select(0, last),
        torch.from_numpy(verified.counts),
        sampled_logprobs(logits, processed, verified_tokens, slots, places),
        mu=mu,
    )
