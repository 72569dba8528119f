"""Builds a `StepPlan` for the worker from the scheduler's decisions (`Schedule`).

The plan has one column per field and one entry per row. The worker executes it without further
decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, islice, repeat
from typing import NamedTuple

from engine_core.grammar.matcher import Matcher
from engine_core.request import Request, RequestPhase
from protocol.arrays import Int32, UInt8
from protocol.steps import SlotInit, SlotRelease, StepPlan


class DraftCatchUp(NamedTuple):
    """The draft model's work for one row of a step. The plan stores the fields in its columns
    `follow_starts`, `follow_tokens` and `wanted`."""

    #: First position to compute; -1: none.
    start: int
    #: Number of positions to compute. If drafts are requested, it is 0: the draft model then
    #: computes all known positions.
    num_tokens: int
    #: Number of tokens to draft after the row's sampled token.
    num_requested: int


@dataclass(slots=True)
class Schedule:
    """The scheduler's decisions for one step."""

    #: Requests that compute one token each, without drafts.
    decodes: list[Request] = field(default_factory=list)
    #: (request, number of tokens to compute), at least 2 tokens each.
    chunks: list[tuple[Request, int]] = field(default_factory=list)
    #: (request, its drafts), at least one draft each. The request computes one token and its
    #: drafts.
    drafted: list[tuple[Request, list[int]]] = field(default_factory=list)
    #: The draft model's work, by request.
    draft_catch_ups: dict[Request, DraftCatchUp] = field(default_factory=dict)
    #: Requests that became RUNNING, in order.
    admitted: list[Request] = field(default_factory=list)
    #: Requests that became PREEMPTED.
    preempted: list[Request] = field(default_factory=list)
    #: (slot, index in the block table, block), for requests that already had their slot: new
    #: blocks, and the null block in place of blocks that a window has passed.
    table_updates: list[tuple[int, int, int]] = field(default_factory=list)
    #: Blocks allocated for new content; the worker zeroes them.
    new_blocks: list[int] = field(default_factory=list)
    #: Tokens left of the token budget.
    budget: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count, _ in self.rows())

    def rows(self) -> Iterator[tuple[Request, int, list[int]]]:
        """Yield (request, number of positions, drafts) for each row, one-token rows first. The
        positions include those of the drafts."""
        for request in self.decodes:
            yield request, 1, []
        for request, drafts in self.drafted:
            yield request, 1 + len(drafts), drafts
        for request, count in self.chunks:
            yield request, count, []


NO_CATCH_UP = DraftCatchUp(start=-1, num_tokens=0, num_requested=0)


def plan_rows(schedule: Schedule) -> list[tuple[Request, int]]:
    """Return (request, number of positions) for each row, one-token rows first."""
    return [(request, count) for request, count, _ in schedule.rows()]


def build_plan(step: int, schedule: Schedule, releases: list[SlotRelease]) -> StepPlan:
    """Build the plan of step number `step`. `releases` are the slots to release first.

    The starts of the rows are read from `num_scheduled`. So call this before
    `InflightSteps.on_sent`, which advances it.
    """
    rows = plan_rows(schedule)
    samples = [request.is_sampled(count) for request, count in rows]
    drafts = [row_drafts for _, _, row_drafts in schedule.rows()]
    catch_ups = [schedule.draft_catch_ups.get(request, NO_CATCH_UP) for request, _ in rows]
    masked = _masked_places(rows, samples, drafts)
    updates = schedule.table_updates
    return StepPlan(
        step=step,
        release=releases,
        bind=[_slot_init(request) for request in schedule.admitted],
        block_slots=Int32.of(slot for slot, _, _ in updates),
        block_indexes=Int32.of(index for _, index, _ in updates),
        block_ids=Int32.of(block for _, _, block in updates),
        zero_blocks=Int32.of(schedule.new_blocks),
        row_slots=Int32.of(_slot(request) for request, _ in rows),
        row_starts=Int32.of(request.num_scheduled for request, _ in rows),
        row_tokens=Int32.of(count for _, count in rows),
        row_samples=UInt8.of(samples),
        num_decodes=len(schedule.decodes),
        masked=Int32.of(masked) if masked else None,
        row_drafts=Int32.of(map(len, drafts)) if schedule.drafted else None,
        drafts=Int32.of(chain.from_iterable(drafts)) if schedule.drafted else None,
        follow_starts=Int32.of(catch_up.start for catch_up in catch_ups)
        if schedule.draft_catch_ups
        else None,
        follow_tokens=Int32.of(catch_up.num_tokens for catch_up in catch_ups)
        if schedule.draft_catch_ups
        else None,
        wanted=Int32.of(catch_up.num_requested for catch_up in catch_ups)
        if schedule.draft_catch_ups
        else None,
    )


def _masked_places(
    rows: Sequence[tuple[Request, int]], samples: Sequence[bool], drafts: Sequence[list[int]]
) -> list[int]:
    """Return the indexes of the sampled places that may need a mask (`StepPlan.masked`)."""
    sampled = compress(zip(rows, drafts, strict=True), samples)
    flags = (
        [_may_be_masked(request, row_drafts)] * (1 + len(row_drafts))
        for (request, _), row_drafts in sampled
    )
    return [place for place, flag in enumerate(chain.from_iterable(flags)) if flag]


def _may_be_masked(request: Request, drafts: list[int]) -> bool:
    """Return whether a place of the request's row may need a mask. After a token in flight or a
    draft, the grammar's state is not known yet. So a mask may be needed there."""
    matcher = request.matcher
    return matcher is not None and (matcher.constrains or bool(request.num_pending or drafts))


def mask_matchers(plan: StepPlan, rows: Sequence[tuple[Request, int]]) -> list[Matcher | None]:
    """Return a matcher for each sampled position that the plan lists in `masked`, in order.

    rows   (request, number of positions) of each row of the plan

    A matcher is None if neither the grammar nor the thinking budget constrains the token at that
    position after all, or if the request is no longer running.
    """
    assert plan.masked is not None
    masked = set(plan.masked.tolist())
    ids = iter([] if plan.drafts is None else plan.drafts.tolist())
    counts = repeat(0, len(rows)) if plan.row_drafts is None else plan.row_drafts.tolist()
    drafted = [
        (request, list(islice(ids, n))) for (request, _), n in zip(rows, counts, strict=True)
    ]
    places = (_row_matchers(*row) for row in compress(drafted, plan.row_samples.tolist()))
    matchers = enumerate(chain.from_iterable(places))
    return [matcher for place, matcher in matchers if place in masked]


def _row_matchers(request: Request, drafts: list[int]) -> Iterable[Matcher | None]:
    """Return the matcher of each sampled place of a row; None for an unconstrained place."""
    if request.matcher is None or request.phase is not RequestPhase.RUNNING:
        return repeat(None, 1 + len(drafts))
    walk = [request.matcher, *request.matcher.walk(drafts)]
    return [matcher if matcher.constrains else None for matcher in walk]


def _slot(request: Request) -> int:
    assert request.slot is not None
    return request.slot


def _slot_init(request: Request) -> SlotInit:
    return SlotInit(
        slot=_slot(request),
        generation=request.slot_generation,
        tokens=Int32(memoryview(request.tokens.tobytes())),
        prompt_tokens=request.prompt_tokens,
        num_computed=request.num_computed,
        blocks=Int32.of(request.block_table),
        seed=request.seed,
        stop_ids=sorted(request.stop_ids),
        params=request.params,
    )
