"""Timelines of an engine with a fake worker, and the slow twin of engine_core/history/timeline.py:
it makes a group for each entry of the log, and merges them afterwards."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import TypeVar

from engine_core.history.requests import RequestHistory
from engine_core.history.steps import StepRun
from engine_core.history.timeline import FindOwner
from protocol.engine.timeline import MAX_SHARES, EngineTimeline, PromptShare, StepGroup
from tests.support.engines import Bench

Result = TypeVar("Result")


def finish(work: Generator[None, None, Result]) -> Result:
    """Run a computation until its end, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result


class TimedBench(Bench):
    """A bench whose steps take a given time by the engine's clock."""

    now = 100.0

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.tick(self.now)

    def timed_step(self, seconds: float = 0.25) -> None:
        while self.plan() is not None:
            pass
        self.pass_time(seconds)
        self.finish(seconds)

    def timeline(self, name: str) -> EngineTimeline:
        (found,) = self.timelines(name)
        return found

    def timelines(self, *names: str) -> list[EngineTimeline]:
        return finish(self.engine.compute_timelines(names, lambda client: client.decode()))


def slow_groups(
    runs: Sequence[StepRun], history: RequestHistory, find_owner: FindOwner, most: int
) -> list[StepGroup]:
    """Return what `runs` computed for the request of `history` and for others, in at most `most`
    groups."""
    groups = [_group(run, history, find_owner) for run in runs]
    size = max(1, -(-len(groups) // most))
    return [_merged(groups[start : start + size]) for start in range(0, len(groups), size)]


def _group(run: StepRun, history: RequestHistory, find_owner: FindOwner) -> StepGroup:
    slots, tokens = run.slots.tolist(), run.tokens.tolist()
    drafts = [0] * len(slots) if run.drafts is None else run.drafts.tolist()
    own_slot = history.slot_in(run.first)
    own = {"prefill": 0, "decode": 0, "draft": 0}
    other = {"prefill": 0, "decode": 0, "draft": 0}
    shares: list[PromptShare] = []
    for row, slot in enumerate(slots):
        kind = "decode" if row < run.num_decodes or drafts[row] else "prefill"
        found = own if slot == own_slot else other
        found["draft"] += drafts[row]
        found[kind] += run.count if kind == "decode" else tokens[row]
        if kind == "prefill" and found is other:
            shares.append(_share(find_owner(slot, run.first), tokens[row]))
    for order, count in run.parts if run.encoded else ():
        (own if order == history.order else other)["prefill"] += count
    return StepGroup(
        start_s=run.started_at - history.arrived_at,
        end_s=run.ended_at - history.arrived_at,
        first_step=run.first,
        steps=run.count,
        busy_s=run.busy_s,
        longest_s=run.longest_s,
        own_prefill=own["prefill"],
        own_decodes=own["decode"],
        own_drafts=own["draft"],
        other_decodes=other["decode"],
        other_prefill=other["prefill"],
        other_drafts=other["draft"],
        lack=run.lack,
        prompts=shares,
    )


def _share(owner: RequestHistory | None, tokens: int) -> PromptShare:
    if owner is None:
        return PromptShare(name="", tokens=tokens, prompt_tokens=tokens)
    return PromptShare(
        name=owner.name, account=owner.account, tokens=tokens, prompt_tokens=owner.prompt_tokens
    )


def _largest(shares: Iterable[PromptShare]) -> list[PromptShare]:
    """Return the largest shares, with one entry for each name of an account."""
    by_name: dict[tuple[str, str], PromptShare] = {}
    for share in shares:
        key = share.account, share.name
        before = by_name.get(key)
        by_name[key] = PromptShare(
            name=share.name,
            account=share.account,
            tokens=share.tokens + (before.tokens if before else 0),
            prompt_tokens=max(share.prompt_tokens, before.prompt_tokens if before else 0),
        )
    return sorted(by_name.values(), key=lambda share: -share.tokens)[:MAX_SHARES]


def _merged(groups: Sequence[StepGroup]) -> StepGroup:
    lacks = [group.lack for group in groups]
    return StepGroup(
        start_s=groups[0].start_s,
        end_s=groups[-1].end_s,
        first_step=groups[0].first_step,
        steps=sum(group.steps for group in groups),
        busy_s=sum(group.busy_s for group in groups),
        longest_s=max(group.longest_s for group in groups),
        own_prefill=sum(group.own_prefill for group in groups),
        own_decodes=sum(group.own_decodes for group in groups),
        own_drafts=sum(group.own_drafts for group in groups),
        other_decodes=sum(group.other_decodes for group in groups),
        other_prefill=sum(group.other_prefill for group in groups),
        other_drafts=sum(group.other_drafts for group in groups),
        lack=max(lacks, key=lacks.count),
        prompts=_largest(share for group in groups for share in group.prompts),
    )
