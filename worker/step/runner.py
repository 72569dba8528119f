"""Runs one step: takes a StepPlan and returns a StepResult.

The runner executes plans in order and decides nothing. It stores no request state of its own: all
of it is in the slots and the KV cache. Launching a step queues all its work on the device without
waiting, so the next step can be queued before this one's tokens are read. The order of the
operations below is part of the contract with the engine (protocol.worker.steps.StepPlan).

Legend: T tokens in the step, S sampled positions, P rows that sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from protocol.wire.arrays import Int32
from protocol.worker.steps import StepPlan, StepResult
from worker.attention.base import Attention
from worker.batch.batch import (
    BatchRows,
    Ints,
    Sampled,
    StepBatch,
    build_batch,
    features_of_rows,
    read_rows,
    stage_drafts,
    step_states,
)
from worker.batch.pending_step import PendingStep, SampledTokens
from worker.device.readback import Mark, Readback, mark
from worker.device.staging import integers, upload
from worker.draft.base import TokenProposer
from worker.kv.cache import PagedCache
from worker.lora.table import AdapterTable, StepAdapters
from worker.models.base import RowModel, StepModel
from worker.models.decoder import DecoderModel
from worker.sampling.bans import row_masks
from worker.sampling.base import Sampling
from worker.sampling.logprobs import prompt_logprobs
from worker.sampling.torch_sampling import TorchSampling
from worker.slots.states import StepStates
from worker.slots.table import SlotTable
from worker.step.decode_fast_path import DecodeFastPath, PlainDecode
from worker.vision.rows import StepImages, step_images


@dataclass(frozen=True, slots=True)
class StepComponents:
    """The parts that a runner computes with."""

    model: StepModel | RowModel
    slots: SlotTable
    cache: PagedCache
    attention: Attention
    sampling: Sampling
    adapters: AdapterTable


def no_masks() -> object:
    """Return None. This is the default `receive_masks`, for plans without masks."""
    return None


class Runner:
    """Executes plans. Owns the slots and the cache of one worker.

    draft_model   the draft model, or the model's own head; needed only by plans that use it
    decode        computes plain decode steps; None: the compiled call, if the model has one
    mark          records the device event that marks the end of a step; see device/readback.py
    sampling      None: torch's
    adapters      the loaded adapters; None: the worker has none
    """

    def __init__(
        self,
        model: StepModel | RowModel,
        slots: SlotTable,
        cache: PagedCache,
        attention: Attention,
        *,
        draft_model: TokenProposer | None = None,
        mark: Mark = mark,
        decode: PlainDecode | None = None,
        sampling: Sampling | None = None,
        adapters: AdapterTable | None = None,
    ) -> None:
        self._model = model
        #: Digest -> the rows of an image that is encoded.
        self.image_rows: dict[str, Tensor] = {}
        self._sees_whole_runs = isinstance(model, DecoderModel) and model.spec.sees_whole_runs
        self._slots = slots
        self._cache = cache
        self._attention = attention
        self.draft_model = draft_model
        self.adapters = AdapterTable() if adapters is None else adapters
        self._mark = mark
        self._sampling = sampling or TorchSampling()
        self._decode = decode or DecodeFastPath.for_model(model, slots, cache)

    @property
    def components(self) -> StepComponents:
        """Return the runner's parts, so that a benchmark can build another runner with them."""
        return StepComponents(
            self._model, self._slots, self._cache, self._attention, self._sampling, self.adapters
        )

    def step(self, plan: StepPlan, receive_masks: Callable[[], object] = no_masks) -> StepResult:
        """Launch a step and wait for its result."""
        return self.launch(plan, receive_masks).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, receive_masks: Callable[[], object] = no_masks) -> PendingStep:
        """Queue the work of the plan on the device. Raises ValueError if the plan contradicts the
        slots.

        receive_masks   returns the message after the plan, which holds its masks; called only if
                        the plan has masked rows, once the work up to the logits is queued
        """
        started = perf_counter()
        readback = Readback(self._slots.device, self._mark)
        self._prepare(plan)
        sampled, prompt_columns, proposed = None, None, None
        if len(plan.row_slots):
            rows = read_rows(plan)
            adapters = self.adapters.for_rows(self._slots, rows.slots, rows.counts)
            images = None
            if self._slots.images:
                images = step_images(
                    rows,
                    self._slots.images,
                    self.image_rows,
                    sees_whole_runs=self._sees_whole_runs,
                )
            decode = None if images is not None else self._decode_for(plan, rows, adapters)
            if decode is not None:
                sampled = self._run_decode(decode, rows, adapters, plan, receive_masks)
                hidden = decode.hidden(len(rows.slots))
            else:
                batch = build_batch(
                    plan,
                    rows,
                    self._slots,
                    block_tokens=self._cache.block_tokens,
                    num_entries=self._cache.num_entries,
                )
                states = step_states(plan, rows, self._slots)
                hidden = self._compute(batch, adapters, states, images)
                prompt_columns = prompt_logprobs(
                    hidden, self._model.logits, self._slots, batch, self._sampling.score
                )
                sampled = self._sample(hidden, batch, plan, receive_masks)
                if states is not None and states.has_drafts:
                    states.accept(_num_accepted(rows, sampled))
                proposed = self._run_draft_model(plan, batch, sampled, hidden)
            if self.draft_model is not None:
                self.draft_model.keep(self._slots, rows, hidden)
        return PendingStep.start_readback(
            plan.step, started, readback, sampled, prompt_columns, proposed
        )

    @torch.inference_mode()
    def zero_draft_blocks(self, blocks: Int32) -> None:
        """Zero these blocks in the draft model's cache. A transfer is about to fill them in the
        main model's cache only, and the draft model must not read an earlier request's K/V in
        them."""
        if self.draft_model is not None:
            (ids,) = upload([integers(blocks.data)], self._slots.device)
            self.draft_model.cache.zero(ids)

    def _prepare(self, plan: StepPlan) -> None:
        """Update slots and blocks, in the order that StepPlan specifies."""
        slots = self._slots
        for released in plan.release:
            slots.release(released.slot, released.generation)
        for init in plan.bind:
            self.adapters.check(init)
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

    def _compute(
        self,
        batch: StepBatch,
        adapters: StepAdapters | None,
        states: StepStates | None,
        images: StepImages | None,
    ) -> Tensor:
        """Return the hidden states [T, hidden] of a step's tokens."""
        model = self._model
        if isinstance(model, RowModel):
            return model.compute_rows(batch.token_ids, batch.rows, self._slots.states)
        if images is not None:
            if not isinstance(model, DecoderModel):
                raise ValueError("a request has images, which the model does not read")
            return model(
                batch.token_ids,
                batch.attention,
                self._cache,
                self._attention,
                adapters,
                states,
                images,
            )
        return model(
            batch.token_ids, batch.attention, self._cache, self._attention, adapters, states
        )

    def _decode_for(
        self, plan: StepPlan, rows: BatchRows, adapters: StepAdapters | None
    ) -> PlainDecode | None:
        """Return the fast path of plain decode steps if it can compute this step, else None."""
        decode = self._decode
        if decode is None or (adapters is not None and not decode.takes_adapters):
            return None
        return decode if decode.is_for(plan, rows) else None

    def _run_decode(
        self,
        decode: PlainDecode,
        rows: BatchRows,
        adapters: StepAdapters | None,
        plan: StepPlan,
        receive_masks: Callable[[], object],
    ) -> SampledTokens:
        """Compute and sample a plain decode step. The call that computes the logits also chooses
        the tokens if it can do so for every row."""
        features = features_of_rows(self._slots, rows.slots)
        choose = not features & ~decode.chosen and plan.masked is None
        logits, choice = decode(rows.slots, rows.starts, choose=choose, adapters=adapters)
        if choice is not None:
            return SampledTokens(choice.tokens, choice.finite, None, None)
        on_host = torch.from_numpy(rows.slots), torch.from_numpy(rows.known)
        slots, known = decode.places(rows)
        last = torch.arange(len(rows.slots), device=slots.device)
        sampled = Sampled(*on_host, slots, known, last, features)
        return self._sample_logits(logits, sampled, rows, plan, receive_masks)

    def _sample(
        self, hidden: Tensor, batch: StepBatch, plan: StepPlan, receive_masks: Callable[[], object]
    ) -> SampledTokens | None:
        """Return the tokens sampled from the step's hidden states, or None if no row samples."""
        if not len(batch.sampled.host_slots):
            return None
        logits = self._model.logits(batch.sampled.select(hidden))
        return self._sample_logits(logits, batch.sampled, batch.rows, plan, receive_masks)

    def _sample_logits(
        self,
        logits: Tensor,
        sampled: Sampled,
        rows: BatchRows,
        plan: StepPlan,
        receive_masks: Callable[[], object],
    ) -> SampledTokens:
        """Sample one token for each of the S positions, and append the tokens that belong to the
        answers to the slots."""
        masks = None
        if plan.masked is not None:
            masks = row_masks(plan, rows, receive_masks(), logits.shape[1], logits.device)
        drafts = None if plan.row_drafts is None else rows.drafts
        return self._sampling.sample(logits, self._slots, sampled, masks=masks, drafts=drafts)

    def _run_draft_model(
        self, plan: StepPlan, batch: StepBatch, sampled: SampledTokens | None, hidden: Tensor
    ) -> Tensor | None:
        """Return the tokens that the draft model proposes; None if the plan does not use it. Raises
        ValueError if the plan uses it and there is no draft model."""
        if plan.follow_starts is None:
            return None
        if self.draft_model is None:
            raise ValueError(f"step {plan.step}: there is no draft model")
        lens = _known_lens(batch, sampled)
        return self.draft_model.catch_up(plan, self._slots, lens, batch.rows, hidden)


def _known_lens(batch: StepBatch, sampled: SampledTokens | None) -> Ints:
    """Return the number of known tokens of each row after sampling, [R] int64. If drafts were
    verified, this waits for the device."""
    rows, lens = batch.rows, batch.rows.known.copy()
    if sampled is not None:
        first, counts = _sampled_counts(rows, sampled)
        lens[rows.sampled[first]] += counts - rows.drafts_after[first]
    return lens


def _num_accepted(rows: BatchRows, sampled: SampledTokens | None) -> Ints:
    """Return how many drafts of each row were right, [R] int64. This waits for the device."""
    accepted = np.zeros_like(rows.counts)
    if sampled is not None:
        first, counts = _sampled_counts(rows, sampled)
        accepted[rows.sampled[first]] = np.minimum(counts - 1, rows.drafts_after[first])
    return accepted


def _sampled_counts(rows: BatchRows, sampled: SampledTokens) -> tuple[Ints, Ints]:
    """Return, for each row that samples, the index of its first sampled place, and the number of
    its new tokens."""
    first = np.flatnonzero(np.diff(rows.sampled, prepend=-1))
    if sampled.counts is None:
        return first, np.ones_like(first)
    return first, sampled.counts.cpu().numpy().astype(np.int64)
