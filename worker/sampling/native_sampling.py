"""Samples the tokens of a step with the compiled kernels (kernels/csrc/sampling.h).

A token is the one that `TorchSampling` chooses, for every row. The kernels apply the bias, the
penalties and the ban of early ends to the few tokens that these concern, and take them back. Stages
that they lack (grammar masks, allowed tokens, bad words, DRY, chains of filters, Mirostat) are
computed with torch; then the kernels draw from the result.

Legend: S sampled places, V vocabulary.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.batch.batch import Ints, Sampled
from worker.batch.pending_step import SampledTokens
from worker.kernels import structs
from worker.kernels.addresses import address
from worker.kernels.native import NativeKernels
from worker.sampling.bans import RowMasks
from worker.sampling.logits import process_logits
from worker.sampling.logprobs import Scores, score, scores_drawn
from worker.sampling.mirostat import limit_surprise
from worker.sampling.sampler import TokenChoice
from worker.sampling.torch_sampling import finished
from worker.slots import features
from worker.slots.table import SlotTable

CHOSEN = features.DRAW | features.BIAS | features.REPETITION | features.COUNTS | features.MIN_TOKENS
"""Features that the kernels compute by themselves."""


def sampler_struct(slots: SlotTable) -> structs.CSampler:
    """Return the addresses of the slot fields that the kernels read. They are valid as long as the
    table."""
    names = structs.SAMPLER_FIELDS
    return structs.CSampler(
        **{name: address(slots[field]) for name, field in names.items()},
        max_tokens=slots.fields["token_ids"].width,
        max_bias=slots.fields["bias_ids"].width,
        max_stops=slots.fields["stop_ids"].width,
    )


@dataclass(frozen=True, slots=True)
class SlotAddresses:
    """A slot table, and the struct with its addresses."""

    slots: SlotTable
    struct: structs.CSampler


class NativeSampling:
    """Samples with compiled kernels, see `Sampling` in base.py."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._library = kernels.library
        self._addresses: SlotAddresses | None = None

    def sample(
        self,
        logits: Tensor,
        slots: SlotTable,
        sampled: Sampled,
        *,
        masks: RowMasks | None = None,
        drafts: Ints | None = None,
    ) -> SampledTokens:
        """Sample a token at each place."""
        is_processed = (
            masks is not None
            or bool(sampled.features & ~(CHOSEN | features.LOGPROBS | features.PROMPT_LOGPROBS))
            or scores_drawn(slots, sampled)
        )
        processed = process_logits(logits, slots, sampled, masks) if is_processed else logits
        limits = limit_surprise(processed, slots, sampled)
        choice = self.choose(processed, slots, sampled, changes=not is_processed)
        return finished(logits, processed, choice, slots, sampled, drafts, limits)

    def choose(
        self, logits: Tensor, slots: SlotTable, sampled: Sampled, *, changes: bool
    ) -> TokenChoice:
        """Choose a token for each row of logits [S, V] float32.

        changes   whether the kernels apply the features CHOSEN; False: `logits` are processed
        """
        logits = logits.contiguous()
        count, vocab = logits.shape
        if logits.dtype is not torch.float32:
            raise ValueError(f"logits must be float32, not {logits.dtype}")
        if self._addresses is None or self._addresses.slots is not slots:
            self._addresses = SlotAddresses(slots, sampler_struct(slots))
        choice = TokenChoice(
            torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.bool)
        )
        self._library.sample(
            torch.get_num_threads(),
            byref(self._addresses.struct),
            count,
            vocab,
            address(logits),
            address(sampled.host_slots),
            address(sampled.host_known),
            changes,
            address(choice.tokens),
            address(choice.finite),
        )
        return choice

    def score(self, logits: Tensor, tokens: Tensor, num_top: int) -> Scores:
        return score(logits, tokens, num_top)
