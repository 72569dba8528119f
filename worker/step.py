"""One step: a StepPlan in, a StepResult out. The order of the lines is the law of the worker.

The runner executes plans in order and decides nothing. It holds no request state: that is in the
slots and in the KV cache alone. To launch a step is to queue all of it on the device, without
waiting for any of it, so that the next one can be queued behind it before its tokens are read.

Legend: T tokens in the step, S sampled places, P rows that sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from protocol.arrays import Int32
from protocol.steps import StepPlan, StepResult
from worker.attention.base import Attention
from worker.batch.batch import (
    BatchRows,
    Ints,
    Sampled,
    StepBatch,
    build_batch,
    extras_of_rows,
    read_rows,
    stage_drafts,
)
from worker.batch.decode_fast_path import DecodeFastPath
from worker.batch.pending_step import PendingStep, SampledTokens
from worker.batch.readback import Mark, Readback, mark
from worker.draft.model import DraftModel
from worker.kv.cache import KVCache
from worker.models.base import StepModel
from worker.sampling.bans import row_masks
from worker.sampling.logits import process_logits
from worker.sampling.logprobs import prompt_logprobs, sampled_logprobs
from worker.sampling.sampler import TokenChoice, sample
from worker.sampling.verify import verify
from worker.slots.staging import integers, upload
from worker.slots.table import SlotTable


@dataclass(frozen=True, slots=True)
class StepParts:
    """What a runner works with."""

    model: StepModel
    slots: SlotTable
    cache: KVCache
    attention: Attention


def no_masks() -> object:
    """For plans that have none."""
    return None


class Runner:
    """Owns the slots and the cache of one worker."""

    def __init__(
        self,
        model: StepModel,
        slots: SlotTable,
        cache: KVCache,
        attention: Attention,
        *,
        draft_model: DraftModel | None = None,
        mark: Mark = mark,
    ) -> None:
        """drafting: for plans that ask it for guesses. mark: what says when a step is done, see
        readback.py."""
        self._model = model
        self._slots = slots
        self._cache = cache
        self._attention = attention
        self.draft_model = draft_model
        self._mark = mark
        self._decode = DecodeFastPath.of(model, slots, cache)

    @property
    def parts(self) -> StepParts:
        """For those who measure (benchmark/): another runner may work with the same."""
        return StepParts(self._model, self._slots, self._cache, self._attention)

    def step(self, plan: StepPlan, await_masks: Callable[[], object] = no_masks) -> StepResult:
        """`launch`, and wait for the result."""
        return self.launch(plan, await_masks).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, await_masks: Callable[[], object] = no_masks) -> PendingStep:
        """Do exactly what the plan says. Raises ValueError if it contradicts the slots.

        await_masks   asked for the plan's `Masks`, if it has any, when all but they is computed
        """
        started = perf_counter()
        readback = Readback(self._slots.device, self._mark)
        self._prepare(plan)
        said, of_prompt, proposed = None, None, None
        if len(plan.row_slots):
            rows = read_rows(plan)
            if self._decode is not None and self._decode.is_for(plan, rows):
                said = self._decoded(self._decode, rows, plan, await_masks)
            else:
                batch = build_batch(plan, rows, self._slots, block_tokens=self._cache.block_tokens)
                hidden = self._model(batch.token_ids, batch.attention, self._cache, self._attention)
                of_prompt = prompt_logprobs(hidden, self._model.logits, self._slots, batch)
                said = self._sample(hidden, batch, plan, await_masks)
                proposed = self._follow(plan, batch, said)
        return PendingStep.of(plan.step, started, readback, said, of_prompt, proposed)

    @torch.inference_mode()
    def await_content(self, blocks: Int32) -> None:
        """These will be filled from elsewhere: with the model's K/V. A draft model has none of it;
        it must not find there what an owner left."""
        if self.draft_model is not None:
            (ids,) = upload([integers(blocks.data)], self._slots.device)
            self.draft_model.cache.zero(ids)

    def _prepare(self, plan: StepPlan) -> None:
        """Slots and blocks, in the order that StepPlan promises."""
        slots = self._slots
        for slot in plan.release.tolist():
            slots.release(slot, slots.occupant(slot).generation)
        for init in plan.bind:
            slots.bind(init)
        if len(plan.block_slots):
            appends = (plan.block_slots, plan.block_indexes, plan.block_ids)
            slots.stage_items("block_table", *(integers(array.data) for array in appends))
        stage_drafts(plan, slots)
        slots.flush()
        if len(plan.zero_blocks):
            (blocks,) = upload([integers(plan.zero_blocks.data)], slots.device)
            self._cache.zero(blocks)
            if self.draft_model is not None:
                self.draft_model.cache.zero(blocks)

    def _decoded(
        self,
        decode: DecodeFastPath,
        rows: BatchRows,
        plan: StepPlan,
        await_masks: Callable[[], object],
    ) -> SampledTokens:
        """What is said in a plain step. Where nobody asks for more than the likeliest token, the
        call that computes the logits has said it."""
        extras = extras_of_rows(self._slots, rows.slots)
        choose = not extras and plan.masked is None
        logits, choice = decode(rows.slots, rows.starts, choose=choose)
        if choice is not None:
            return SampledTokens(choice.tokens, choice.finite, None, None)
        slots, known, last = map(torch.from_numpy, (rows.slots, rows.known, rows.sampled))
        sampled = Sampled(slots, known, slots, known, last, extras)
        return self._say(logits, sampled, rows, plan, await_masks)

    def _sample(
        self, hidden: Tensor, batch: StepBatch, plan: StepPlan, await_masks: Callable[[], object]
    ) -> SampledTokens | None:
        """What is said at the sampled places."""
        if not len(batch.sampled.host_slots):
            return None
        logits = self._model.logits(batch.sampled.of(hidden))
        return self._say(logits, batch.sampled, batch.rows, plan, await_masks)

    def _say(
        self,
        logits: Tensor,
        sampled: Sampled,
        rows: BatchRows,
        plan: StepPlan,
        await_masks: Callable[[], object],
    ) -> SampledTokens:
        """What is said at the sampled places, written where it will be read from."""
        slots, masks = self._slots, None
        if plan.masked is not None:
            masks = row_masks(plan, rows, await_masks(), logits.shape[1], logits.device)
        processed = process_logits(logits, slots, sampled, masks)
        choice = sample(processed, slots, sampled)
        if plan.row_drafts is not None:
            return self._verified(logits, processed, choice, sampled, rows)
        slots.append_tokens(sampled.slots, sampled.known, choice.tokens)
        logprobs = sampled_logprobs(logits, processed, choice.tokens, slots, sampled)
        return SampledTokens(choice.tokens, choice.finite, None, logprobs)

    def _verified(
        self,
        logits: Tensor,
        processed: Tensor,
        choice: TokenChoice,
        sampled: Sampled,
        rows: BatchRows,
    ) -> SampledTokens:
        """Of what was sampled, the answers' part. Drafts that are, stand where they should. Waits
        for the device."""
        tokens, finite = choice.tokens.cpu().numpy(), choice.finite.cpu().numpy()
        kept = verify(tokens, finite, rows.guesses)
        of, last = upload([kept.places, kept.places[kept.last]], self._slots.device)
        ends = sampled.only(kept.places[kept.last])
        self._slots.append_tokens(ends.slots, ends.known, choice.tokens.index_select(0, last))
        logits, processed, kept_tokens = (
            tensor.index_select(0, of) for tensor in (logits, processed, choice.tokens)
        )
        return SampledTokens(
            kept_tokens,
            choice.finite.index_select(0, last),
            torch.from_numpy(kept.counts),
            sampled_logprobs(
                logits, processed, kept_tokens, self._slots, sampled.only(kept.places)
            ),
        )

    def _follow(
        self, plan: StepPlan, batch: StepBatch, said: SampledTokens | None
    ) -> Tensor | None:
        """What the draft model guesses, if it is asked."""
        if plan.follow_starts is None:
            return None
        if self.draft_model is None:
            raise ValueError(f"step {plan.step}: there is no draft model")
        return self.draft_model.follow(plan, self._slots, _lens(batch, said))


def _lens(batch: StepBatch, said: SampledTokens | None) -> Ints:
    """[R] int64: how many tokens of each row are known once the step has sampled."""
    rows, lens = batch.rows, batch.rows.known.copy()
    if said is not None:
        first = np.flatnonzero(np.diff(rows.sampled, prepend=-1))
        counts = np.ones_like(first) if said.counts is None else said.counts.numpy()
        lens[rows.sampled[first]] += counts - rows.behind[first]
    return lens
