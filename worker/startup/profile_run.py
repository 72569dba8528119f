"""Measures how much memory the largest step takes on a GPU.

The steps run with the loaded weights before the K/V cache is allocated. They need a cache, but no
one reads what they compute, so all columns of all block tables name the same block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from protocol.engine.sampling import MAX_LOGPROBS, DryBreaker, SamplingParams
from protocol.wire.arrays import Int32, UInt8
from protocol.worker.steps import NO_CHECKPOINT, Masks, SlotInit, SlotRelease, StepPlan
from worker.errors import NotEnoughMemory
from worker.slots.fields import slot_fields
from worker.slots.table import SlotField
from worker.spec.step_limits import StepLimits
from worker.step.runner import Runner

CACHE_BLOCKS = 2
"""The null block, and the block that all columns name."""
ALL_FEATURES = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    typical_p=0.9,
    top_n_sigma=3.0,
    dynatemp_range=0.5,
    xtc_probability=0.5,
    mirostat=2,
    dry_multiplier=0.8,
    dry_breakers=[DryBreaker([0]), DryBreaker([0], [1])],
    min_tokens=2,
    frequency_penalty=0.5,
    presence_penalty=0.5,
    repetition_penalty=1.1,
    logit_bias={0: 1.0},
    bad_words=[[0, 1]],
    allowed_token_ids=[0, 1],
    logprobs=MAX_LOGPROBS,
    logprobs_of="both",
    logprob_token_ids=[0],
    prompt_logprobs=MAX_LOGPROBS,
)


class Allocator(Protocol):
    """The allocator of a device's memory. All numbers are bytes of this process's tensors."""

    def allocated(self) -> int:
        """Return the bytes in use."""
        ...

    def reset_peak(self) -> None: ...

    def peak(self) -> int:
        """Return the most bytes in use since `reset_peak`."""
        ...

    def release(self) -> None:
        """Return unused memory to the driver."""
        ...


class CudaAllocator:
    """torch's caching allocator of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def release(self) -> None:
        torch.cuda.empty_cache()


def measure(run: Callable[[], object], allocator: Allocator, limits: StepLimits) -> int:
    """Return the most bytes that `run` uses at a time, in addition to those in use before.

    `run` is called twice, because in the first run kernels are compiled and tuned, which takes
    other memory than a step. Raises NotEnoughMemory if the memory is not enough for a run.
    """
    try:
        run()
        allocator.release()
        before = allocator.allocated()
        allocator.reset_peak()
        run()
    except torch.OutOfMemoryError as error:
        raise NotEnoughMemory(
            f"the weights leave too little memory for a step of {limits.token_budget:,} tokens of "
            f"{limits.max_slots:,} requests ({str(error).partition('.')[0]})",
            remedy="a smaller --token-budget or --max-slots, or a smaller model",
        ) from None
    finally:
        allocator.release()
    return allocator.peak() - before


@dataclass(frozen=True, slots=True)
class RowSpan:
    """A row of a step: it computes the positions [start, end), of which the last are drafts."""

    start: int
    end: int
    num_drafts: int = 0

    @property
    def count(self) -> int:
        return self.end - self.start

    @property
    def known(self) -> int:
        """Number of tokens that are known before the step."""
        return self.end - self.num_drafts


def largest_steps(limits: StepLimits, max_len: int) -> list[list[RowSpan]]:
    """Return the rows of steps, one of which takes the most memory that any step can take.

    - as many tokens as possible, of as many requests as possible, all of which sample
    - as many tokens as possible of one prompt
    - the last token of the longest request, for attention that gathers all earlier keys and values
    - its last two tokens, for kernels that split the keys of a few queries, and that would
      otherwise be compiled while requests wait
    - that last token, beside as many tokens as possible at the end of another longest request, for
      attention that splits the keys of both
    - with speculation, as many sampled places as possible
    """
    budget = limits.token_budget
    num_rows = min(limits.max_slots, budget)
    each, rest = divmod(budget, num_rows)
    counts = [min(each + (row >= num_rows - rest), max_len) for row in range(num_rows)]
    steps = [
        [RowSpan(0, count) for count in counts],
        [RowSpan(0, min(budget, max_len))],
        [RowSpan(max_len - 1, max_len)],
    ]
    if min(budget, max_len) > 1:
        steps.append([RowSpan(max_len - 2, max_len)])
    if num_rows > 1:
        chunk = min(budget - 1, max_len)
        steps.append([RowSpan(max_len - 1, max_len), RowSpan(max_len - chunk, max_len)])
    drafts = min(limits.max_drafts, budget - 1, max_len - 1)
    if drafts:
        rows = min(limits.max_slots, budget // (1 + drafts))
        steps.append([RowSpan(0, 1 + drafts, drafts)] * rows)
    return steps


@dataclass(frozen=True, slots=True)
class ProfileRun:
    """Runs the largest steps of a model.

    max_len        longest request that the server could accept, in tokens
    num_entries    blocks in a column of a block table
    has_draft      whether the runner has a draft model or head
    """

    limits: StepLimits
    max_len: int
    vocab_size: int
    block_tokens: int
    num_entries: int
    has_draft: bool
    #: Numbers of a recurrent state; 0: the model has none.
    state_items: int = 0
    #: Numbers of a hidden state that the model's own head reads; 0: it has none.
    head_hidden: int = 0

    def slot_fields(self) -> tuple[SlotField, ...]:
        """Return the fields of the slots that the runner needs."""
        num_blocks = self._columns(self._width) * self.num_entries
        return slot_fields(self._width, num_blocks, self.state_items, self.head_hidden)

    def run(self, runner: Runner) -> None:
        """Run the steps in free slots, with generations from 0 on. The slots of the last step stay
        bound, and block 1 of the runner's caches is overwritten."""
        bound: list[SlotRelease] = []
        for number, rows in enumerate(largest_steps(self.limits, self.max_len)):
            plan = self.plan(number, rows, bound)
            runner.step(plan, partial(self._masks, plan))
            bound = [SlotRelease(slot=init.slot, generation=number) for init in plan.bind]

    def plan(self, number: int, rows: list[RowSpan], release: list[SlotRelease]) -> StepPlan:
        """Return the plan of a step in which every row uses every sampling feature.

        number   number of the step, and generation of its slots
        """
        none, drafts = Int32.of([]), [row.num_drafts for row in rows]
        starts = Int32.of([row.start for row in rows])
        places = sum(drafts) + len(rows)
        return StepPlan(
            step=number,
            release=release,
            bind=[self._init(slot, number, row) for slot, row in enumerate(rows)],
            block_slots=none,
            block_indexes=none,
            block_ids=none,
            zero_blocks=none,
            row_slots=Int32.of(list(range(len(rows)))),
            row_starts=starts,
            row_tokens=Int32.of([row.count for row in rows]),
            row_samples=UInt8.of([1] * len(rows)),
            num_decodes=sum(row.count == 1 for row in rows),
            masked=Int32.of(list(range(places))),
            row_drafts=Int32.of(drafts) if any(drafts) else None,
            drafts=Int32.of([0] * sum(drafts)) if any(drafts) else None,
            follow_starts=starts if self.has_draft else None,
            follow_tokens=Int32.of([row.known - row.start for row in rows])
            if self.has_draft
            else None,
            wanted=Int32.of([0] * len(rows)) if self.has_draft else None,
        )

    @property
    def _width(self) -> int:
        """Tokens in a slot: the longest request, and the token that is sampled after it."""
        return self.max_len + 1

    def _columns(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def _init(self, slot: int, generation: int, row: RowSpan) -> SlotInit:
        return SlotInit(
            slot=slot,
            generation=generation,
            tokens=Int32.of([0] * row.known),
            prompt_tokens=row.known,
            num_computed=row.start,
            checkpoint=1 if row.start and self.state_items else NO_CHECKPOINT,
            blocks=Int32.of([1] * (self._columns(row.end) * self.num_entries)),
            seed=0,
            stop_ids=[0],
            params=ALL_FEATURES,
        )

    def _masks(self, plan: StepPlan) -> Masks:
        """Return masks that allow every token at every place of the plan."""
        assert plan.masked is not None
        shape = (len(plan.masked), -(-self.vocab_size // 32))
        return Masks(step=plan.step, bits=Int32(b"\xff" * (4 * shape[0] * shape[1]), shape))
