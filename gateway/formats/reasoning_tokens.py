"""Counts the reasoning tokens of an answer, by the token ids of the markers.

The markers themselves do not count. If a format's markers are not single tokens, nothing is
counted, because the result would depend on how the text is tokenized.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.formats.registry import BoundFormat


class ThinkingMarks(msgspec.Struct, frozen=True):
    """The ids that start and end a block of reasoning; `many` is true if there may be several."""

    opens: frozenset[int]
    closes: frozenset[int]
    many: bool


def thinking_marks(bound: BoundFormat) -> ThinkingMarks | None:
    """Return the ids of the markers that start and end reasoning. If calls end the reasoning, the
    markers of calls are included. Return None if the format has no marker that closes reasoning, or
    if one of these markers is not a single token."""
    reasoning, tools = bound.format.reasoning, bound.format.tools
    if reasoning is None or not reasoning.close:
        return None
    calls = tools.markers() if tools is not None and reasoning.calls_end_it else ()
    ids = {marker: token_id for token_id, marker in bound.lexicon.tokens.items()}
    if not all(marker in ids for marker in (*reasoning.open, *reasoning.close, *calls)):
        return None
    return ThinkingMarks(
        opens=frozenset(ids[marker] for marker in reasoning.open),
        closes=frozenset(ids[marker] for marker in (*reasoning.close, *calls)),
        many=not reasoning.only_at_start,
    )


class ReasoningCounter:
    """Counts the reasoning tokens of one choice. Its state is `inside` and `count`."""

    __slots__ = ("_all", "_marks", "count", "inside")

    def __init__(self, marks: ThinkingMarks, *, starts_inside: bool) -> None:
        self._marks = marks
        self._all = marks.opens | marks.closes
        self.inside = starts_inside
        self.count = 0

    def push(self, ids: Sequence[int]) -> None:
        marks = self._marks
        if self._all.isdisjoint(ids):  # as nearly always
            self.count += len(ids) if self.inside else 0
            return
        for token_id in ids:
            if self.inside:
                self.inside = token_id not in marks.closes
                self.count += self.inside and token_id not in marks.opens
            elif token_id in marks.opens:
                self.inside = marks.many or not self.count
