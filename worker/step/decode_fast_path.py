"""Plain decode steps, in which every row computes one position and samples after it.

Most steps are plain, so they have implementations of their own: one compiled call on a CPU, in this
file, and captured graphs on a GPU (decode_graph.py). Both read and write the same slot fields as
the general path (batch.py, the model, sampling/sampler.py, SlotTable.append_tokens). That path is
the reference. The compiled call gives the same results as it, bit for bit.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from protocol.worker.steps import StepPlan
from worker.batch.batch import BatchRows, Ints
from worker.kernels import structs
from worker.kernels.addresses import address
from worker.kv.cache import PagedCache
from worker.lora.table import StepAdapters
from worker.models.base import RowModel, StepModel
from worker.models.decoder import DecoderModel
from worker.models.whole_step import PassMemory, WholePass
from worker.sampling.native_sampling import CHOSEN, sampler_struct
from worker.sampling.sampler import TokenChoice
from worker.slots.fields import ROPE_SHIFT
from worker.slots.table import SlotTable

NO_ADAPTERS = structs.CStepAdapters()


def is_plain(plan: StepPlan, rows: BatchRows) -> bool:
    """Return whether every row computes one position and samples after it, and the draft model has
    no work."""
    return len(rows.sampled) == plan.num_decodes == len(rows.slots) and plan.follow_starts is None


class PlainDecode(Protocol):
    """An implementation of plain decode steps.

    takes_adapters   whether it can compute rows with adapters
    chosen           the features (slots/features.py) with which it can choose tokens
    """

    takes_adapters: bool
    chosen: int

    def is_for(self, plan: StepPlan, rows: BatchRows) -> bool:
        """Return whether the compiled path can compute this step."""
        ...

    def __call__(
        self, slots: Ints, starts: Ints, *, choose: bool, adapters: StepAdapters | None = None
    ) -> tuple[Tensor, TokenChoice | None]:
        """Compute the positions `starts` [R] of `slots` [R], which must exist.

        Return logits [R, V] float32, valid until the next call. With `choose`, also return the
        chosen tokens, which the call has appended to the slots; otherwise None. Raises ValueError
        for a position outside its slot or a token outside the vocabulary.
        """
        ...

    def places(self, rows: BatchRows) -> tuple[Tensor, Tensor]:
        """Return the slots and the positions of the new tokens of the step that was just computed,
        [R] int64 each, in the device's memory."""
        ...

    def hidden(self, num_rows: int) -> Tensor:
        """Return the hidden states [R, hidden] of the step of R = `num_rows` rows that was just
        computed, before the final norm. They are valid until the next call."""
        ...


@dataclass(slots=True)
class DecodeCall:
    """Arguments and work memory of the compiled call for steps of R rows. Each step sets only the
    addresses of its slots, starts and results.

    hidden   [R * hidden] work memory, flat
    logits   [R * V] the result, flat
    """

    step: structs.CDecode
    memory: PassMemory
    hidden: Tensor
    logits: Tensor

    @property
    def num_rows(self) -> int:
        return int(self.step.forward.tokens)


class DecodeFastPath:
    """The compiled decode step of one model, its slots and its cache. Implements PlainDecode."""

    takes_adapters = True
    chosen = CHOSEN

    def __init__(self, whole: WholePass, slots: SlotTable, cache: PagedCache) -> None:
        self._whole = whole
        self._slots = slots
        self._cache = cache
        self._call: DecodeCall | None = None
        self._shifts = address(slots[ROPE_SHIFT]) if ROPE_SHIFT in slots.fields else None

    @classmethod
    def for_model(
        cls, model: StepModel | RowModel, slots: SlotTable, cache: PagedCache
    ) -> Self | None:
        """Return the fast path, or None if the model has no `WholePass`."""
        if not isinstance(model, DecoderModel) or model.whole is None:
            return None
        return cls(model.whole, slots, cache)

    def is_for(self, plan: StepPlan, rows: BatchRows) -> bool:
        return is_plain(plan, rows) and self._whole.is_for(len(rows.slots))

    def __call__(
        self, slots: Ints, starts: Ints, *, choose: bool, adapters: StepAdapters | None = None
    ) -> tuple[Tensor, TokenChoice | None]:
        table, count = self._slots, len(slots)
        max_tokens = min(table.fields["token_ids"].width, self._whole.max_positions + 1)
        if starts.min() < 0 or starts.max() >= max_tokens - 1:
            raise ValueError(f"a row exceeds {max_tokens} tokens")
        call = self._call
        if call is None or call.num_rows != count:
            call = self._call = self._prepared(count)
        step = call.step
        self._whole.use_cache(self._cache)
        step.slots, step.starts = slots.ctypes.data, starts.ctypes.data
        step.forward.adapters = NO_ADAPTERS if adapters is None else adapters.struct
        step.rope_shifts = self._shifts if table.images else None
        choice = _no_choice(count) if choose else None
        step.tokens, step.finite = (
            (None, None) if choice is None else map(address, (choice.tokens, choice.finite))
        )
        library = self._whole.kernels.library
        bad = library.decode(self._whole.dtype_code, torch.get_num_threads(), byref(step))
        if bad >= 0:
            raise ValueError(
                f"slot {slots[bad]} holds a token outside the vocabulary of {self._whole.vocab}"
            )
        return call.logits.view(count, -1), choice

    def places(self, rows: BatchRows) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(rows.slots), torch.from_numpy(rows.known)

    def hidden(self, num_rows: int) -> Tensor:
        assert self._call is not None, "a step must run first"
        return self._call.hidden.view(num_rows, -1)

    def _prepared(self, count: int) -> DecodeCall:
        whole, table, memory = self._whole, self._slots, PassMemory()
        logits = torch.empty(count * whole.head.weight.outputs)
        hidden = torch.empty(count * whole.head.weight.inputs)
        forward = whole.forward(count, self._cache, memory)
        forward.x = address(hidden)
        forward.rows.block_tokens = self._cache.block_tokens
        step = structs.CDecode(
            forward=forward,
            head=whole.head,
            token_ids=address(table["token_ids"]),
            lens=address(table["len"]),
            block_table=address(table["block_table"]),
            max_tokens=table.fields["token_ids"].width,
            max_blocks=table.fields["block_table"].width,
            num_entries=self._cache.num_entries,
            vocab=whole.vocab,
            logits=address(logits),
            sampler=sampler_struct(table),
        )
        return DecodeCall(step, memory, hidden, logits)


def _no_choice(count: int) -> TokenChoice:
    """Return a choice with uninitialised tensors, which the compiled call fills."""
    return TokenChoice(torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.bool))
