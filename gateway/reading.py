"""How a model's answers are read: the formats chosen for it, and why. Made once per model."""

from __future__ import annotations

import msgspec

from gateway.metering import ThinkingMarks, thinking_marks
from gateway.output.formats import BoundFormat


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """tools, reasoning  names of docs/formats.md; None: no such thing in this model's answers
    why                 how they were chosen, in words for the operator
    with_calls          for requests with tools; None: all text is content
    without_calls       for all others
    """

    tools: str | None
    reasoning: str | None
    why: str
    with_calls: BoundFormat | None
    without_calls: BoundFormat | None

    def bound(self, *, calls: bool) -> BoundFormat | None:
        return self.with_calls if calls else self.without_calls

    def marks(self, *, calls: bool) -> ThinkingMarks | None:
        bound = self.bound(calls=calls)
        return thinking_marks(bound) if bound is not None else None

    def starts_inside(self, prompt: str, *, calls: bool) -> bool:
        """Whether an answer to this rendered prompt begins inside a block of reasoning."""
        bound = self.bound(calls=calls)
        reasoning = bound.format.reasoning if bound is not None else None
        if reasoning is None:
            return False
        tail = prompt.rstrip()
        if tail.endswith(reasoning.open):
            return True
        return reasoning.default_inside and not tail.endswith(reasoning.close)


NO_READING = Reading(
    tools=None, reasoning=None, why="nothing was found", with_calls=None, without_calls=None
)
