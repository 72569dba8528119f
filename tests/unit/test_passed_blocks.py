"""Which cached blocks of a model with windows are evicted first: those that a window has passed,
unless they were found again."""

from __future__ import annotations

import pytest

from engine_core.blocks.pool import BlockPool
from engine_core.blocks.prefix_cache import PrefixCache
from protocol.engine.kv_window import KVGroups
from tests.support.engines import Bench

BLOCK_TOKENS = 16
GROUPS = KVGroups(window=64, window_blocks=2)
"""A third of the layers has no window: 39 columns and a window of 5 columns take 49 blocks."""
PROMPT_TOKENS, FOUND_TOKENS = 630, 624
SESSIONS, ROUNDS = 6, 3


def a_text(number: int, length: int = PROMPT_TOKENS) -> list[int]:
    return [(number * 1000 + n * n) % 95 + 1 for n in range(length)]


def a_bench(num_blocks: int) -> Bench:
    return Bench(
        num_blocks=num_blocks,
        block_tokens=BLOCK_TOKENS,
        token_budget=256,
        max_len=2000,
        kv_groups=GROUPS,
    )


def num_found(bench: Bench, prompt: list[int]) -> int:
    """Run a request, and return how many tokens of its prompt were found."""
    number = bench.add(prompt, max_tokens=4, ignore_eos=True)
    bench.run()
    return bench.last_output(number).usage.cached_tokens


# ---- hits
@pytest.mark.parametrize("num_blocks", [350, 380, 400, 450, 500, 550, 600, 700])
def test_sessions_in_turn_are_found_again_if_what_they_need_fits(num_blocks: int) -> None:
    """Six sessions need 294 blocks together, and the running one a few more."""
    bench = a_bench(num_blocks)
    sessions = [a_text(number) for number in range(SESSIONS)]
    found = [[num_found(bench, prompt) for prompt in sessions] for _ in range(ROUNDS)]
    assert found == [[0] * SESSIONS] + [[FOUND_TOKENS] * SESSIONS] * (ROUNDS - 1)


@pytest.mark.parametrize("num_blocks", [400, 600])
def test_a_beginning_that_other_prompts_share_is_kept_once_it_was_missed(num_blocks: int) -> None:
    """The cache is full before. The first prompt passes the blocks at the end of the beginning, and
    the second one finds only those of the layers without a window."""
    bench, others = a_bench(num_blocks), iter(range(100, 200))
    for _ in range(12):
        num_found(bench, a_text(next(others)))
    beginning, found = a_text(50, 20 * BLOCK_TOKENS), []
    for number in range(7):
        found.append(num_found(bench, beginning + a_text(60 + number, 300)))
        for _ in range(3):
            num_found(bench, a_text(next(others), 400))
    assert found[2:] == [len(beginning)] * 5


# ---- the pool
def a_pool(num_blocks: int) -> BlockPool:
    """Return a pool in which all blocks are held and cached."""
    pool = BlockPool(num_blocks + 1, PrefixCache())
    blocks = pool.allocate(num_blocks)
    assert blocks == [*range(1, num_blocks + 1)]
    for block in blocks:
        pool.cache.publish(bytes([block]), block, is_draft_computed=False)
    return pool


def test_passed_blocks_are_allocated_after_empty_ones_and_before_other_cached_ones() -> None:
    pool = a_pool(6)
    pool.cache.remove(6)
    pool.release([1])
    pool.release([2, 3], passed=True)
    pool.release([4], passed=True)
    pool.release([5])
    pool.release([6])
    assert (pool.num_free, pool.num_cached) == (6, 5)
    assert all(map(pool.is_free, range(1, 7)))
    assert pool.allocate(7) is None
    assert pool.allocate(3) == [6, 3, 2]
    assert pool.allocate(3) == [4, 1, 5]
    assert pool.num_cached == 0


def test_a_passed_block_that_was_found_counts_as_an_ordinary_one() -> None:
    pool = a_pool(3)
    pool.release([1, 2], passed=True)
    pool.share([1])
    pool.release([3])
    pool.release([1], passed=True)
    assert pool.allocate(3) == [2, 3, 1]
    pool.release([1])
    pool.cache.publish(b"new", 2, is_draft_computed=False)
    pool.cache.publish(b"newer", 3, is_draft_computed=False)
    pool.release([3])
    pool.release([2], passed=True)
    assert pool.allocate(3) == [1, 2, 3], "new content must be proven anew"


def test_a_block_that_was_missed_counts_as_an_ordinary_one() -> None:
    pool = a_pool(3)
    pool.prove([2])
    pool.release([1])
    pool.release([2, 3], passed=True)
    assert pool.allocate(3) == [3, 1, 2]


def test_the_last_holder_decides_whether_a_block_is_passed() -> None:
    pool = a_pool(2)
    pool.share([1])
    pool.release([1], passed=True)
    assert not pool.is_free(1)
    pool.release([1])
    pool.release([2], passed=True)
    assert pool.allocate(2) == [2, 1]
