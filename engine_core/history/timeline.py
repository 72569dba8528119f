"""Builds the timeline of one request from the log of steps and the histories of requests. Pure.

A timeline may cover thousands of entries of the log. So it is built by a generator, which yields
after each entry: the caller decides how many entries one turn of its loop processes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from engine_core.history.requests import RequestHistory
from engine_core.history.steps import StepRun
from protocol.engine.timeline import (
    MAX_GROUPS,
    MAX_SHARES,
    EngineTimeline,
    Lack,
    PromptShare,
    StageSpan,
    StepGroup,
)
from protocol.engine.usage import Usage

FindOwner = Callable[[int, int], RequestHistory | None]
"""Returns the request that had a slot in a step: (slot, number of the step) -> its history."""


def build_timeline(
    history: RequestHistory,
    usage: Usage,
    runs: Sequence[StepRun],
    find_owner: FindOwner,
    *,
    now: float,
    client: str,
    slots: int,
    has_lost_steps: bool,
) -> Generator[None, None, EngineTimeline]:
    """Build the timeline of a request, one entry of the log per `next`.

    - usage: its usage until now or until its end
    - runs: the steps between its arrival and now or its end
    - client, slots: the name of its client, and the number of slots of the engine
    - has_lost_steps: whether the log does not reach back to its arrival
    """
    start, end = history.arrived_at, now if history.ended_at is None else history.ended_at
    stages = _stages(history, end)
    groups: list[StepGroup] = []
    size = max(1, -(-len(runs) // MAX_GROUPS))  # entries of each group
    for first in range(0, len(runs), size):
        sums = _GroupSums()
        entries = runs[first : first + size]
        for run in entries:
            sums.add(run, history, find_owner)
            yield
        groups.append(sums.group(entries, start))
    return EngineTimeline(
        name=history.name,
        client=client,
        account=history.account,
        finish=history.finish,
        abort_reason=history.abort_reason,
        took_s=end - start,
        ended_ago_s=now - end,
        prompt_tokens=usage.prompt_tokens,
        images=history.images,
        image_tokens=history.image_tokens,
        cached_tokens=usage.cached_tokens,
        fetched_tokens=usage.fetched_tokens,
        generated_tokens=usage.generated_tokens,
        preemptions=usage.preemptions,
        draft_tokens=usage.draft_tokens,
        accepted_tokens=usage.accepted_tokens,
        first_token_s=_since(history.first_token_at, start),
        slots=slots,
        stages=stages,
        groups=groups,
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


@dataclass(slots=True)
class _GroupSums:
    """Token counts of a group of steps, for the request of the timeline and for other requests."""

    own_prefill: int = 0
    own_decodes: int = 0
    own_drafts: int = 0
    other_decodes: int = 0
    other_prefill: int = 0
    other_drafts: int = 0
    #: Owner of each other prompt -> its tokens that were computed, and those of the largest chunk.
    #: None: the owners that the history no longer has.
    shares: dict[RequestHistory | None, tuple[int, int]] = field(default_factory=dict)

    def add(self, run: StepRun, history: RequestHistory, find_owner: FindOwner) -> None:
        """Add an entry of the log. Only columns that are needed are converted to lists."""
        slots = run.slots.tolist()
        row = _own_row(run, slots, history)
        first_prompt = run.num_decodes
        row_drafts = 0
        if run.drafts is not None:
            drafts = run.drafts.tolist()
            first_prompt += run.num_drafted
            row_drafts = 0 if row is None else drafts[row]
            self.own_drafts += row_drafts
            self.other_drafts += sum(drafts) - row_drafts
        is_decode = row is not None and row < first_prompt
        self.own_decodes += is_decode * run.count
        self.other_decodes += (first_prompt - is_decode) * run.count
        if first_prompt < len(slots):
            tokens = run.tokens.tolist()
            for other in range(first_prompt, len(slots)):
                if other == row:
                    self.own_prefill += tokens[other]
                else:
                    self._share(find_owner(slots[other], run.first), tokens[other])
        if run.encoded:
            for order, count in run.parts:
                if order == history.order:
                    self.own_prefill += count
                else:
                    self.other_prefill += count

    def _share(self, owner: RequestHistory | None, tokens: int) -> None:
        self.other_prefill += tokens
        total, largest = self.shares.get(owner, (0, 0))
        self.shares[owner] = total + tokens, max(largest, tokens)

    def group(self, runs: Sequence[StepRun], start: float) -> StepGroup:
        """Return the group of `runs`, which were all added. Times are relative to `start`."""
        lacks: list[Lack] = [run.lack for run in runs]
        return StepGroup(
            start_s=runs[0].started_at - start,
            end_s=runs[-1].ended_at - start,
            first_step=runs[0].first,
            steps=sum(run.count for run in runs),
            busy_s=sum(run.busy_s for run in runs),
            longest_s=max(run.longest_s for run in runs),
            own_prefill=self.own_prefill,
            own_decodes=self.own_decodes,
            own_drafts=self.own_drafts,
            other_decodes=self.other_decodes,
            other_prefill=self.other_prefill,
            other_drafts=self.other_drafts,
            lack=max(lacks, key=lacks.count),
            prompts=_largest(self.shares),
        )


def _own_row(run: StepRun, slots: Sequence[int], history: RequestHistory) -> int | None:
    """Return the request's row in the steps of `run`; None if it has none."""
    slot = history.slot_in(run.first)
    return slots.index(slot) if slot is not None and slot in slots else None


def _largest(shares: dict[RequestHistory | None, tuple[int, int]]) -> list[PromptShare]:
    """Return the largest prompt shares, summed over equal request names of the same account."""
    by_name: dict[tuple[str, str], tuple[int, int]] = {}
    for owner, (tokens, largest) in shares.items():
        key = ("", "") if owner is None else (owner.account, owner.name)
        length = largest if owner is None else owner.prompt_tokens
        total, longest = by_name.get(key, (0, 0))
        by_name[key] = total + tokens, max(longest, length)
    found = sorted(by_name.items(), key=lambda item: -item[1][0])[:MAX_SHARES]
    return [
        PromptShare(name=name, account=account, tokens=tokens, prompt_tokens=length)
        for (account, name), (tokens, length) in found
    ]
