"""Vectors in responses: other greenlets run while they are written."""

from __future__ import annotations

import gevent
import msgspec

from gateway.api.encode.prepare import TURN_NUMBERS, in_turns, written_in_turns
from gateway.api.encode.responses import EmbeddingItem


def test_written_items_are_encoded_as_the_items_are() -> None:
    items = [EmbeddingItem(index=index, embedding=[0.5, float(index)]) for index in range(3)]
    assert msgspec.json.encode(written_in_turns(iter(items), 2)) == msgspec.json.encode(items)
    assert written_in_turns([], 2) == []


def test_other_greenlets_run_while_many_vectors_are_handled() -> None:
    turns: list[int] = []
    handled: list[int] = []

    def other() -> None:
        while True:
            turns.append(len(handled))
            gevent.sleep(0)

    greenlet = gevent.spawn(other)
    for number in in_turns(range(12), TURN_NUMBERS // 4):
        handled.append(number)
    greenlet.kill()
    assert sorted(set(turns)) == [4, 8, 12]
