"""The count of thinking tokens is the same however the answer's token ids are cut."""

from __future__ import annotations

import random

import pytest

from gateway.formats.reasoning_tokens import ReasoningCounter, ThinkingMarks

OPEN, CLOSE, CALL = 1, 2, 3


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("starts_inside", [False, True])
def test_ids_together_count_as_one_by_one(many: bool, starts_inside: bool) -> None:
    marks = ThinkingMarks(opens=frozenset({OPEN}), closes=frozenset({CLOSE, CALL}), many=many)
    for seed in range(200):
        chance = random.Random(seed)
        ids = chance.choices((OPEN, CLOSE, CALL, 7, 8, 9), (1, 1, 1, 4, 4, 4), k=30)
        together, alone = (ReasoningCounter(marks, starts_inside=starts_inside) for _ in range(2))
        for token in ids:
            alone.push([token])
        while ids:
            size = chance.randrange(1, 8)
            together.push(ids[:size])
            ids = ids[size:]
        assert (together.count, together.inside) == (alone.count, alone.inside)


def test_markers_and_text_outside_of_them_are_not_counted() -> None:
    marks = ThinkingMarks(opens=frozenset({OPEN}), closes=frozenset({CLOSE}), many=True)
    meter = ReasoningCounter(marks, starts_inside=False)
    for ids in ([7, 8], [OPEN], [7, 8, 9], [CLOSE, 7], [7]):
        meter.push(ids)
    assert meter.count == 3
