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
from engine_core.requests.request import Request, RequestPhase
from engine_core.schedule.columns import samples_column, slot_column, start_column
from engine_core.schedule.inflight import InflightStep
from protocol.wire.arrays import Int32, UInt8
from protocol.worker.steps import NO_ADAPTER, NO_CHECKPOINT, SlotInit, SlotRelease, StepPlan


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
    #: Requests of which the step does not compute all known tokens. They sample nothing.
    partial: set[Request] = field(default_factory=set)
    #: Requests that became RUNNING, in order.
    admitted: list[Request] = field(default_factory=list)
    #: Requests that became PREEMPTED.
    preempted: list[Request] = field(default_factory=list)
    #: (slot, index in the block table, block), for requests that already had their slot: new
    #: blocks, and the null block in place of blocks that a window has passed.
    table_updates: list[tuple[int, int, int]] = field(default_factory=list)
    #: Blocks allocated for new content; the worker zeroes them.
    new_blocks: list[int] = field(default_factory=list)
    #: The checkpoints that `admitted` requests start with.
    checkpoints: dict[Request, int] = field(default_factory=dict)
    #: Checkpoints that requests of the step start with, or would start with if their fetch failed.
    #: The step holds them until its saves are planned, so that no fetch of this step reuses one.
    reads: list[int] = field(default_factory=list)
    #: (request, number of leading positions, checkpoint) of each recurrent state to save.
    saves: list[tuple[Request, int, int]] = field(default_factory=list)
    #: Tokens left of the token budget.
    budget: int = 0

    @property
    def num_tokens(self) -> int:
        drafts = sum(1 + len(drafts) for _, drafts in self.drafted)
        return len(self.decodes) + drafts + sum(count for _, count in self.chunks)

    def rows(self) -> Iterator[tuple[Request, int, list[int]]]:
        """Yield (request, number of positions, drafts) for each row, one-token rows first. The
        positions include those of the drafts."""
        for request in self.decodes:
            yield request, 1, []
        for request, drafts in self.drafted:
            yield request, 1 + len(drafts), drafts
        for request, count in self.chunks:
            yield request, count, []


class RowColumns(NamedTuple):
    """The rows of a step in the order of `Schedule.rows`, with one column per fact."""

    requests: list[Request]
    #: Number of positions of each row, including those of its drafts.
    counts: list[int]

    @classmethod
    def from_schedule(cls, schedule: Schedule) -> RowColumns:
        requests, counts = schedule.decodes[:], [1] * len(schedule.decodes)
        for request, drafts in schedule.drafted:
            requests.append(request)
            counts.append(1 + len(drafts))
        for request, count in schedule.chunks:
            requests.append(request)
            counts.append(count)
        return cls(requests, counts)


NO_ENTRIES = Int32.of([])
NO_CATCH_UP = DraftCatchUp(start=-1, num_tokens=0, num_requested=0)


def build_plan(
    step: int,
    schedule: Schedule,
    rows: RowColumns,
    releases: list[SlotRelease],
    newest: InflightStep | None,
) -> StepPlan:
    """Build the plan of step number `step`.

    - rows: the rows of `schedule`
    - releases: the slots to release first
    - newest: the newest step in flight, if any. If this step repeats it, its columns are used again

    The starts of the rows are read from `num_scheduled`. So call this before
    `InflightSteps.on_sent`, which advances it.
    """
    requests, updates, saves = rows.requests, schedule.table_updates, schedule.saves
    catch_ups = _catch_ups(schedule, requests)
    row_slots, row_tokens, row_samples = (
        (newest.plan.row_slots, newest.plan.row_tokens, newest.plan.row_samples)
        if newest is not None and repeats(schedule, requests, newest)
        else (
            Int32.of(slot_column(requests)),
            Int32.of(rows.counts),
            UInt8.of(row_samples_column(schedule, requests)),
        )
    )
    masked = _masked_places(schedule, requests, row_samples)
    row_drafts = [drafts for _, _, drafts in schedule.rows()] if schedule.drafted else None
    return StepPlan(
        step=step,
        release=releases,
        bind=[
            _slot_init(request, schedule.checkpoints.get(request, NO_CHECKPOINT))
            for request in schedule.admitted
        ],
        block_slots=_int32([slot for slot, _, _ in updates]),
        block_indexes=_int32([index for _, index, _ in updates]),
        block_ids=_int32([block for _, _, block in updates]),
        zero_blocks=_int32(schedule.new_blocks),
        row_slots=row_slots,
        row_starts=Int32.of(start_column(requests)),
        row_tokens=row_tokens,
        row_samples=row_samples,
        num_decodes=len(schedule.decodes),
        masked=Int32.of(masked) if masked else None,
        row_drafts=None if row_drafts is None else Int32.of(map(len, row_drafts)),
        drafts=None if row_drafts is None else Int32.of(chain.from_iterable(row_drafts)),
        follow_starts=None if catch_ups is None else Int32.of([row.start for row in catch_ups]),
        follow_tokens=None if catch_ups is None else Int32.of([r.num_tokens for r in catch_ups]),
        wanted=None if catch_ups is None else Int32.of([row.num_requested for row in catch_ups]),
        save_slots=Int32.of([_slot(request) for request, _, _ in saves]) if saves else None,
        save_lens=Int32.of([position for _, position, _ in saves]) if saves else None,
        save_checkpoints=Int32.of([number for _, _, number in saves]) if saves else None,
    )


def repeats(schedule: Schedule, requests: Sequence[Request], newest: InflightStep) -> bool:
    """Return whether the rows of a step are those of the newest step in flight, and each computes
    one position and samples in both.

    No slot has changed in between, because the requests are in flight. After a step that samples
    for a request, the request lacks one position, so it samples again.
    """
    return (
        len(schedule.decodes) == len(requests) == newest.plan.num_decodes
        and requests == newest.requests
        and 0 not in newest.plan.row_samples.tolist()
    )


def row_samples_column(schedule: Schedule, requests: Sequence[Request]) -> list[bool]:
    """Return whether each row samples (`Request.is_sampled`)."""
    samples, partial = samples_column(requests), schedule.partial
    if not partial:
        return samples
    return [
        flag and request not in partial for request, flag in zip(requests, samples, strict=True)
    ]


def _int32(values: list[int]) -> Int32:
    return Int32.of(values) if values else NO_ENTRIES


def _catch_ups(schedule: Schedule, requests: Sequence[Request]) -> list[DraftCatchUp] | None:
    """Return the draft model's work for each row, or None if there is none in any row."""
    if not schedule.draft_catch_ups:
        return None
    return [schedule.draft_catch_ups.get(request, NO_CATCH_UP) for request in requests]


def _masked_places(
    schedule: Schedule, requests: Sequence[Request], row_samples: UInt8
) -> list[int]:
    """Return which of the step's sampled positions may need a mask: their indexes among all
    sampled positions (`StepPlan.masked`)."""
    if not any([request.matcher is not None for request in requests]):
        return []
    flags = (
        [_may_be_masked(request, drafts)] * (1 + len(drafts))
        for request, _, drafts in compress(schedule.rows(), row_samples.tolist())
    )
    return [place for place, flag in enumerate(chain.from_iterable(flags)) if flag]


def _may_be_masked(request: Request, drafts: list[int]) -> bool:
    """Return whether a sampled position of the request's row may need a mask. After a token in
    flight or a draft, the grammar's state is not known yet, so a mask may be needed there."""
    matcher = request.matcher
    return matcher is not None and (matcher.constrains or bool(request.num_pending or drafts))


def mask_matchers(plan: StepPlan, requests: Sequence[Request]) -> list[Matcher | None]:
    """Return a matcher for each sampled position that the plan lists in `masked`, in order.

    requests   the request of each row of the plan

    A matcher is None if neither the grammar nor the thinking budget constrains the token at that
    position after all, or if the request is no longer running.
    """
    assert plan.masked is not None
    masked = set(plan.masked.tolist())
    ids = iter([] if plan.drafts is None else plan.drafts.tolist())
    counts = repeat(0, len(requests)) if plan.row_drafts is None else plan.row_drafts.tolist()
    drafted = [(request, list(islice(ids, n))) for request, n in zip(requests, counts, strict=True)]
    places = (_row_matchers(*row) for row in compress(drafted, plan.row_samples.tolist()))
    matchers = enumerate(chain.from_iterable(places))
    return [matcher for place, matcher in matchers if place in masked]


def _row_matchers(request: Request, drafts: list[int]) -> Iterable[Matcher | None]:
    """Return the matcher of each sampled position of a row. It is None for an unconstrained
    position, and for all positions if the request is no longer running."""
    if request.matcher is None or request.phase is not RequestPhase.RUNNING:
        return repeat(None, 1 + len(drafts))
    walk = [request.matcher, *request.matcher.walk(drafts)]
    return [matcher if matcher.constrains else None for matcher in walk]


def _slot(request: Request) -> int:
    assert request.slot is not None
    return request.slot


def _slot_init(request: Request, checkpoint: int) -> SlotInit:
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
        adapter=NO_ADAPTER if request.adapter is None else request.adapter.row,
        adapter_generation=0 if request.adapter is None else request.adapter.generation,
        checkpoint=checkpoint,
        images=list(request.images),
        mirostat_mu=request.mirostat_mu,
    )
