"""What one step will do, as the scheduler decides it and plan.py writes it down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from engine_core.request import Request


class DraftCatchUp(NamedTuple):
    """One row's part for a draft model, as StepPlan has it."""

    start: int
    num_tokens: int
    wanted: int


@dataclass(slots=True)
class Schedule:
    """What one step will do.

    decodes    requests of one token each;  chunks: (request, how many tokens, at least 2)
    drafted    (request, its drafts, at least one): one token each, and as many as drafts
    followed   what a draft model computes, too
    admitted   newly RUNNING, in order;  preempted: newly PREEMPTED
    grown      (slot, index in the block table, block) for requests that held a slot before
    fresh      blocks taken for new content: to be zeroed
    """

    decodes: list[Request] = field(default_factory=list)
    chunks: list[tuple[Request, int]] = field(default_factory=list)
    drafted: list[tuple[Request, list[int]]] = field(default_factory=list)
    followed: dict[Request, DraftCatchUp] = field(default_factory=dict)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    grown: list[tuple[int, int, int]] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    budget: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count, _ in self.rows())

    def rows(self) -> Iterator[tuple[Request, int, list[int]]]:
        """(request, how many positions, its drafts among these). One-token rows come first."""
        for request in self.decodes:
            yield request, 1, []
        for request, drafts in self.drafted:
            yield request, 1 + len(drafts), drafts
        for request, count in self.chunks:
            yield request, count, []
