"""The conversations of `python -m tests.benchmarks.agent_turns`, with a server that only counts."""

from __future__ import annotations

import pytest

from tests.benchmarks.agent_turns import (
    ANSWER_TOKENS,
    BLOCK_TOKENS,
    SHARED_TOKENS,
    Turn,
    common,
    converse,
    missed,
)


class BlockCache:
    """A server that finds the whole blocks that it has computed, every `stride` blocks."""

    def __init__(self, stride: int = 1) -> None:
        self._size = stride * BLOCK_TOKENS
        self._known: list[list[int]] = []

    def complete(self, prompt: list[int]) -> tuple[list[int], int, int]:
        found = max((common(prompt[:-1], each) for each in self._known), default=0)
        cached = found // self._size * self._size
        answer = [len(self._known) + 5] * ANSWER_TOKENS
        self._known.append([*prompt, *answer[:-1]])
        return answer, cached, len(prompt) - cached


def turns(cache: BlockCache, dropped: int = 0) -> list[Turn]:
    return converse(cache.complete, lambda: 7, conversations=2, turns=3, dropped=dropped, seed=1)


@pytest.mark.parametrize("dropped", [0, 20])
def test_a_cache_of_blocks_computes_the_new_text_and_less_than_a_block(dropped: int) -> None:
    found = turns(BlockCache(), dropped)
    assert [(turn.number, turn.conversation) for turn in found] == [
        (number, conversation) for number in (1, 2, 3) for conversation in (1, 2)
    ]
    first, second, *later = found
    assert first.new == first.prompt > SHARED_TOKENS
    assert second.new < 100, "its beginning is that of the first conversation"
    assert all(0 <= turn.again < BLOCK_TOKENS for turn in found)
    assert all(200 < turn.new - (ANSWER_TOKENS - dropped) * bool(dropped) < 700 for turn in later)
    assert all(turn.checkpoint_bytes == 7 for turn in found)
    assert missed(found) == []


def test_a_turn_that_computes_more_is_found() -> None:
    found = turns(BlockCache(stride=20))
    assert missed(found)
    assert all(turn.again > BLOCK_TOKENS for turn in missed(found))


def test_only_the_second_conversations_first_turn_may_compute_its_shared_beginning() -> None:
    late = Turn(conversation=2, number=1, prompt=90, new=10, cached=0, computed=90)
    assert missed([late]) == []
    assert missed([Turn(conversation=3, number=1, prompt=90, new=10, cached=0, computed=90)])
