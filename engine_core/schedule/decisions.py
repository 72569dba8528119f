"""The decisions of one step, made by the scheduler and written into a StepPlan by plan.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from engine_core.request import Request


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
    grown: list[tuple[int, int, int]] = field(default_factory=list)
    #: Blocks allocated for new content; the worker zeroes them.
    fresh: list[int] = field(default_factory=list)
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
