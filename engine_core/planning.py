"""Schedule -> StepPlan: decisions written down in columns, for the worker to execute blindly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, compress

from engine_core.grammar.matcher import Matcher
from engine_core.request import Phase, Request
from engine_core.scheduler import Schedule
from protocol.arrays import Int32, UInt8
from protocol.steps import SlotInit, StepPlan


def work_of(schedule: Schedule) -> list[tuple[Request, int]]:
    """The step's rows in order: (request, how many positions). One-token rows come first."""
    drafted = [(request, 1 + len(drafts)) for request, drafts in schedule.drafted]
    return [(request, 1) for request in schedule.decodes] + drafted + schedule.chunks


def build_plan(
    step: int, schedule: Schedule, released_slots: Sequence[int], generations: Mapping[int, int]
) -> StepPlan:
    """`generations`: slot -> its present generation, already counted up for `schedule.admitted`."""
    work = work_of(schedule)
    samples = [request.samples and count >= request.num_uncomputed for request, count in work]
    sampled = compress((request for request, _ in work), samples)
    masked = [index for index, request in enumerate(sampled) if _may_be_masked(request)]
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
        row_drafts=_row_drafts(schedule),
        drafts=_drafts(schedule),
    )


def _row_drafts(schedule: Schedule) -> Int32 | None:
    if not schedule.drafted:
        return None
    counts = [len(drafts) for _, drafts in schedule.drafted]
    return Int32.of([0] * len(schedule.decodes) + counts + [0] * len(schedule.chunks))


def _drafts(schedule: Schedule) -> Int32 | None:
    if not schedule.drafted:
        return None
    return Int32.of(chain.from_iterable(drafts for _, drafts in schedule.drafted))


def matchers_of(plan: StepPlan, work: Sequence[tuple[Request, int]]) -> list[Matcher | None]:
    """Of the plan's `masked` rows, in their order; None: nothing constrains the token after all, or
    the answer has ended and nobody will hear of it."""
    assert plan.masked is not None
    sampled = list(compress((request for request, _ in work), plan.row_samples.tolist()))
    masked = (sampled[index] for index in plan.masked.tolist())
    return [_matcher(request) if request.phase is Phase.RUNNING else None for request in masked]


def _matcher(request: Request) -> Matcher | None:
    """What constrains the next token, if anything does."""
    matcher = request.matcher
    return matcher if matcher is not None and matcher.constrains else None


def _may_be_masked(request: Request) -> bool:
    """Behind a token that is still on its way anything may be."""
    return _matcher(request) is not None or bool(request.matcher and request.num_pending)


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
