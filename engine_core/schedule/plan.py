"""Schedule -> StepPlan: the decisions as columns, which the worker executes as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress, islice, repeat

from engine_core.grammar.matcher import Matcher
from engine_core.request import Request, RequestPhase
from engine_core.schedule.decisions import DraftCatchUp, Schedule
from protocol.arrays import Int32, UInt8
from protocol.steps import SlotInit, StepPlan

NO_CATCH_UP = DraftCatchUp(start=-1, num_tokens=0, num_requested=0)


def plan_rows(schedule: Schedule) -> list[tuple[Request, int]]:
    """Return the step's rows in order: (request, number of positions).

    One-token rows come first.
    """
    return [(request, count) for request, count, _ in schedule.rows()]


def build_plan(
    step: int, schedule: Schedule, released_slots: Sequence[int], generations: Mapping[int, int]
) -> StepPlan:
    """Build the step's plan.

    `generations`: slot -> its generation, already incremented for `schedule.admitted`.
    """
    work = plan_rows(schedule)
    samples = [request.is_sampled(count) for request, count in work]
    drafts = [some for _, _, some in schedule.rows()]
    catch_ups = [schedule.draft_catch_ups.get(request, NO_CATCH_UP) for request, _ in work]
    masked = _masked_places(work, samples, drafts)
    grown = schedule.grown
    return StepPlan(
        step=step,
        release=Int32.of(released_slots),
        bind=[_slot_init(request, generations) for request in schedule.admitted],
        block_slots=Int32.of(slot for slot, _, _ in grown),
        block_indexes=Int32.of(index for _, index, _ in grown),
        block_ids=Int32.of(block for _, _, block in grown),
        zero_blocks=Int32.of(schedule.fresh),
        row_slots=Int32.of(_slot(request) for request, _ in work),
        row_starts=Int32.of(request.num_scheduled for request, _ in work),
        row_tokens=Int32.of(count for _, count in work),
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
    work: Sequence[tuple[Request, int]], samples: Sequence[bool], drafts: Sequence[list[int]]
) -> list[int]:
    rows = compress(zip(work, drafts, strict=True), samples)
    may_be = ([_may_be_masked(request, some)] * (1 + len(some)) for (request, _), some in rows)
    return [place for place, flag in enumerate(chain.from_iterable(may_be)) if flag]


def _may_be_masked(request: Request, drafts: list[int]) -> bool:
    """Whether a mask may be needed. It is unknown after a token in flight, or after a draft."""
    matcher = request.matcher
    return matcher is not None and (matcher.constrains or bool(request.num_pending or drafts))


def mask_matchers(plan: StepPlan, work: Sequence[tuple[Request, int]]) -> list[Matcher | None]:
    """Return the matchers of the plan's `masked` places, in order.

    None means that nothing constrains the token after all, or that the answer has ended.
    """
    assert plan.masked is not None
    masked = set(plan.masked.tolist())
    ids = iter([] if plan.drafts is None else plan.drafts.tolist())
    counts = repeat(0, len(work)) if plan.row_drafts is None else plan.row_drafts.tolist()
    rows = [(request, list(islice(ids, n))) for (request, _), n in zip(work, counts, strict=True)]
    places = (_row_matchers(*row) for row in compress(rows, plan.row_samples.tolist()))
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


def _slot_init(request: Request, generations: Mapping[int, int]) -> SlotInit:
    slot = _slot(request)
    return SlotInit(
        slot=slot,
        generation=generations[slot],
        tokens=Int32(memoryview(request.tokens.tobytes())),
        prompt_tokens=request.prompt_tokens,
        num_computed=request.num_computed,
        blocks=Int32.of(request.blocks),
        seed=request.seed,
        stop_ids=sorted(request.stop_ids),
        params=request.params,
    )
