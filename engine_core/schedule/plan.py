"""One step: the scheduler's decisions (`Schedule`), and the `StepPlan` that is built from them.

The plan holds the decisions as columns, which the worker executes as they are.
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
    """The draft model's work for one row, as in StepPlan."""

    start: int
    num_tokens: int
    num_requested: int


@dataclass(slots=True)
class Schedule:
    """The decisions of one step."""

    #: Requests with one token each.
    decodes: list[Request] = field(default_factory=list)
    #: (request, number of tokens, at least 2).
    chunks: list[tuple[Request, int]] = field(default_factory=list)
    #: (request, its drafts, at least one): one token, plus one per draft.
    drafted: list[tuple[Request, list[int]]] = field(default_factory=list)
    #: The draft model's work, by request.
    draft_catch_ups: dict[Request, DraftCatchUp] = field(default_factory=dict)
    #: Newly RUNNING, in order.
    admitted: list[Request] = field(default_factory=list)
    #: Newly PREEMPTED.
    preempted: list[Request] = field(default_factory=list)
    #: (slot, index in the block table, block), for requests that already had their slot.
    appended_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    #: Blocks allocated for new content; the worker zeroes them.
    new_blocks: list[int] = field(default_factory=list)
    #: Tokens left in the token budget.
    budget: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count, _ in self.rows())

    def rows(self) -> Iterator[tuple[Request, int, list[int]]]:
        """Yield (request, number of positions, its drafts among them).

        One-token rows come first.
        """
        for request in self.decodes:
            yield request, 1, []
        for request, drafts in self.drafted:
            yield request, 1 + len(drafts), drafts
        for request, count in self.chunks:
            yield request, count, []


NO_CATCH_UP = DraftCatchUp(start=-1, num_tokens=0, num_requested=0)


def plan_rows(schedule: Schedule) -> list[tuple[Request, int]]:
    """Return the step's rows in order: (request, number of positions).

    One-token rows come first.
    """
    return [(request, count) for request, count, _ in schedule.rows()]


def build_plan(step: int, schedule: Schedule, releases: list[SlotRelease]) -> StepPlan:
    """Build the step's plan."""
    rows = plan_rows(schedule)
    samples = [request.is_sampled(count) for request, count in rows]
    drafts = [some for _, _, some in schedule.rows()]
    catch_ups = [schedule.draft_catch_ups.get(request, NO_CATCH_UP) for request, _ in rows]
    masked = _masked_places(rows, samples, drafts)
    appended = schedule.appended_blocks
    return StepPlan(
        step=step,
        release=releases,
        bind=[_slot_init(request) for request in schedule.admitted],
        block_slots=Int32.of(slot for slot, _, _ in appended),
        block_indexes=Int32.of(index for _, index, _ in appended),
        block_ids=Int32.of(block for _, _, block in appended),
        zero_blocks=Int32.of(schedule.new_blocks),
        row_slots=Int32.of(_slot(request) for request, _ in rows),
        row_starts=Int32.of(request.num_scheduled for request, _ in rows),
        row_tokens=Int32.of(count for _, count in rows),
        row_samples=UInt8.of(samples),
        num_decodes=len(schedule.decodes),
        masked=Int32.of(masked) if masked else None,
        row_drafts=Int32.of(map(len, drafts)) if schedule.drafted else None,
        drafts=Int32.of(chain.from_iterable(drafts)) if schedule.drafted else None,
        follow_starts=Int32.of(part.start for part in catch_ups)
        if schedule.draft_catch_ups
        else None,
        follow_tokens=Int32.of(part.num_tokens for part in catch_ups)
        if schedule.draft_catch_ups
        else None,
        wanted=Int32.of(part.num_requested for part in catch_ups)
        if schedule.draft_catch_ups
        else None,
    )


def _masked_places(
    rows: Sequence[tuple[Request, int]], samples: Sequence[bool], drafts: Sequence[list[int]]
) -> list[int]:
    sampled = compress(zip(rows, drafts, strict=True), samples)
    may_be = ([_may_be_masked(request, some)] * (1 + len(some)) for (request, _), some in sampled)
    return [place for place, flag in enumerate(chain.from_iterable(may_be)) if flag]


def _may_be_masked(request: Request, drafts: list[int]) -> bool:
    """Whether a mask may be needed. It is unknown after a token in flight, or after a draft."""
    matcher = request.matcher
    return matcher is not None and (matcher.constrains or bool(request.num_pending or drafts))


def mask_matchers(plan: StepPlan, rows: Sequence[tuple[Request, int]]) -> list[Matcher | None]:
    """Return the matchers of the plan's `masked` places, in order.

    None means that nothing constrains the token after all, or that the answer has ended.
    """
    assert plan.masked is not None
    masked = set(plan.masked.tolist())
    ids = iter([] if plan.drafts is None else plan.drafts.tolist())
    counts = repeat(0, len(rows)) if plan.row_drafts is None else plan.row_drafts.tolist()
    drafted = [
        (request, list(islice(ids, n))) for (request, _), n in zip(rows, counts, strict=True)
    ]
    places = (_row_matchers(*row) for row in compress(drafted, plan.row_samples.tolist()))
    return [m for place, m in enumerate(chain.from_iterable(places)) if place in masked]


def _row_matchers(request: Request, drafts: list[int]) -> Iterable[Matcher | None]:
    """Return the matcher of each place of a row, or None if the place is unconstrained."""
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
        blocks=Int32.of(request.blocks),
        seed=request.seed,
        stop_ids=sorted(request.stop_ids),
        params=request.params,
    )
