"""Builds the timeline of one request from the log of steps and the histories of requests. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from engine_core.history.requests import RequestHistory
from engine_core.history.steps import StepRun
from protocol.timeline import (
    MAX_GROUPS,
    MAX_SHARES,
    EngineTimeline,
    PromptShare,
    StageSpan,
    StepGroup,
)
from protocol.usage import Usage

FindOwner = Callable[[int, int], RequestHistory | None]
"""Returns the request that had a slot in a step: (slot, number of the step) -> its history."""


def build_timeline(
    history: RequestHistory,
    usage: Usage,
    runs: Iterable[StepRun],
    find_owner: FindOwner,
    *,
    now: float,
    client: str,
    slots: int,
    has_lost_steps: bool,
) -> EngineTimeline:
    """Return the timeline of a request.

    - usage: its usage until now or until its end
    - runs: the steps between its arrival and now or its end
    - client, slots: the name of its client, and the number of slots of the engine
    - has_lost_steps: whether the log does not reach back to its arrival
    """
    start, end = history.arrived_at, now if history.ended_at is None else history.ended_at
    groups = [_group(run, history, find_owner) for run in runs]
    return EngineTimeline(
        name=history.name,
        client=client,
        account=history.account,
        finish=history.finish,
        took_s=end - start,
        ended_ago_s=now - end,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        fetched_tokens=usage.fetched_tokens,
        generated_tokens=usage.generated_tokens,
        preemptions=usage.preemptions,
        draft_tokens=usage.draft_tokens,
        accepted_tokens=usage.accepted_tokens,
        first_token_s=_since(history.first_token_at, start),
        slots=slots,
        stages=_stages(history, end),
        groups=merged(groups, MAX_GROUPS),
        has_lost_steps=has_lost_steps,
    )


def _since(at: float | None, start: float) -> float | None:
    return None if at is None else at - start


def _stages(history: RequestHistory, end: float) -> list[StageSpan]:
    """Return the stages of a request with times relative to its arrival, without empty ones."""
    start = history.arrived_at
    times = [*(at for _, at in history.spans), end]
    return [
        StageSpan(stage=stage, start_s=at - start, end_s=until - start)
        for (stage, _), (at, until) in zip(history.spans, pairwise(times), strict=True)
        if until > at
    ]


def _group(run: StepRun, history: RequestHistory, find_owner: FindOwner) -> StepGroup:
    """Return what an entry of the log computed for the request of `history` and for others."""
    slots, tokens = run.slots.tolist(), run.tokens.tolist()
    drafts = [0] * len(slots) if run.drafts is None else run.drafts.tolist()
    row = _own_row(run, slots, history)
    own_drafts = 0 if row is None else drafts[row]
    own_decodes = int(row is not None and (row < run.num_decodes or own_drafts > 0))
    own_prefill = 0 if row is None or own_decodes else tokens[row]
    own_encoded = all_encoded = 0
    if run.encoded:
        own_encoded = sum(count for order, count in run.parts if order == history.order)
        all_encoded = sum(count for _, count in run.parts)
    first_prompt = run.num_decodes + run.num_drafted
    shares = [
        (slots[other], tokens[other]) for other in range(first_prompt, len(slots)) if other != row
    ]
    start = history.arrived_at
    return StepGroup(
        start_s=run.started_at - start,
        end_s=run.ended_at - start,
        first_step=run.first,
        steps=run.count,
        busy_s=run.busy_s,
        longest_s=run.longest_s,
        own_prefill=own_prefill + own_encoded,
        own_decodes=own_decodes * run.count,
        own_drafts=own_drafts,
        other_decodes=(first_prompt - own_decodes) * run.count,
        other_prefill=sum(count for _, count in shares) + all_encoded - own_encoded,
        other_drafts=sum(drafts) - own_drafts,
        lack=run.lack,
        prompts=_largest(_share(find_owner(slot, run.first), count) for slot, count in shares),
    )


def _own_row(run: StepRun, slots: Sequence[int], history: RequestHistory) -> int | None:
    """Return the request's row in the steps of `run`; None if it has none."""
    slot = history.slot_in(run.first)
    return slots.index(slot) if slot is not None and slot in slots else None


def _share(owner: RequestHistory | None, tokens: int) -> PromptShare:
    if owner is None:
        return PromptShare(name="", tokens=tokens, prompt_tokens=tokens)
    return PromptShare(
        name=owner.name,
        account=owner.account,
        tokens=tokens,
        prompt_tokens=owner.prompt_tokens,
    )


def _largest(shares: Iterable[PromptShare]) -> list[PromptShare]:
    """Return the largest shares, with one entry for each request."""
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


def merged(groups: Sequence[StepGroup], most: int) -> list[StepGroup]:
    """Return at most `most` groups: as many neighbours as necessary are merged, always the same
    number."""
    size = -(-len(groups) // most)
    if size <= 1:
        return list(groups)
    return [_merge(groups[start : start + size]) for start in range(0, len(groups), size)]


def _merge(groups: Sequence[StepGroup]) -> StepGroup:
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
