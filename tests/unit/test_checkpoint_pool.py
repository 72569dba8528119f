"""The pool of checkpoints: which id is allocated next, and where a prefix ends."""

from __future__ import annotations

import pytest

from engine_core.blocks.checkpoints import CheckpointPool
from engine_core.blocks.pool import BlockPool
from engine_core.blocks.prefix_cache import PrefixCache

A, B, C, D = (bytes([number]) for number in range(4))


def a_pool(*cached: bytes, total: int = 3) -> CheckpointPool:
    """Return a pool that has cached a checkpoint for each of these hashes, in this order."""
    pool = CheckpointPool(total)
    for content in cached:
        number = pool.allocate(max_held=total)
        assert number is not None
        pool.publish(content, number)
    return pool


def counts(pool: CheckpointPool) -> tuple[int, int, int]:
    return len(pool.free), pool.num_held, pool.num_cached


def test_free_checkpoints_are_allocated_before_cached_ones() -> None:
    pool = a_pool(A, B)
    assert pool.allocate(max_held=3) == 3
    assert counts(pool) == (0, 1, 2)


def test_the_checkpoint_that_was_used_longest_ago_is_evicted_first() -> None:
    pool = a_pool(A, B, C)
    assert pool.use(A) == 1
    assert [pool.allocate(max_held=3) for _ in range(3)] == [2, 3, 1]
    assert not any(content in pool for content in (A, B, C))


def test_no_checkpoint_is_allocated_while_all_are_held() -> None:
    pool = CheckpointPool(2)
    assert [pool.allocate(max_held=2) for _ in range(3)] == [1, 2, None]
    pool.release(1)
    assert pool.allocate(max_held=2) == 1


def test_a_cached_checkpoint_is_evicted_only_below_the_limit_of_held_ones() -> None:
    pool = a_pool(A, B)
    assert pool.allocate(max_held=0) == 3, "a free one is allocated in any case"
    assert pool.allocate(max_held=1) is None
    assert pool.allocate(max_held=2) == 1


def test_a_second_checkpoint_of_the_same_state_is_freed_and_the_first_counts_as_used() -> None:
    pool = a_pool(A, B)
    number = pool.allocate(max_held=3)
    assert number == 3
    pool.publish(A, number)
    assert (pool.items(), pool.free) == ({A: 1, B: 2}, [3])
    assert [pool.allocate(max_held=3) for _ in range(3)] == [3, 2, 1]


def test_a_pool_without_checkpoints_finds_and_allocates_nothing() -> None:
    pool = CheckpointPool(0)
    assert pool.allocate(max_held=0) is None
    assert pool.num_covered([A, B], 2) == 0


@pytest.mark.parametrize(
    ("cached", "num_blocks", "covered"),
    [((), 3, 0), ((A,), 3, 1), ((A, C), 3, 3), ((A, C), 2, 1), ((C,), 2, 0), ((A, B, C), 0, 0)],
)
def test_a_prefix_ends_in_its_last_checkpoint(
    cached: tuple[bytes, ...], num_blocks: int, covered: int
) -> None:
    assert a_pool(*cached).num_covered([A, B, C], num_blocks) == covered


# ---- beside the blocks
def a_cache(total: int) -> tuple[BlockPool, CheckpointPool]:
    """Return a pool of blocks, of which 1 to 3 are held and have the contents A, B and C, and a
    pool of checkpoints that follow A and B."""
    checkpoints = a_pool(A, B, total=total)
    blocks = BlockPool(5, PrefixCache(checkpoints=checkpoints))
    assert blocks.allocate(4) == [1, 2, 3, 4]
    for block, content in enumerate((A, B, C), 1):
        blocks.cache.publish(content, block, is_draft_computed=False)
    return blocks, checkpoints


def test_a_checkpoint_is_freed_when_its_block_leaves_the_cache() -> None:
    blocks, checkpoints = a_cache(2)
    blocks.release([2, 3])
    assert blocks.allocate(1) == [3]
    assert checkpoints.items() == {A: 1, B: 2}
    assert blocks.allocate(1) == [2]
    assert (checkpoints.items(), checkpoints.free) == ({A: 1}, [2])


def test_a_held_block_takes_the_place_of_a_free_one_with_the_same_content() -> None:
    blocks, checkpoints = a_cache(2)
    blocks.release([1, 2, 3], passed=True)
    blocks.replace(B, 4, is_draft_computed=False)
    assert blocks.cache.find(B) == 4
    assert checkpoints.items() == {A: 1, B: 2}
    assert (blocks.num_free, blocks.num_cached) == (3, 2)
    assert blocks.allocate(1) == [2], "it has no content any more"
    assert checkpoints.items() == {A: 1, B: 2}


def test_a_held_block_keeps_its_place_in_the_cache() -> None:
    blocks, _ = a_cache(2)
    blocks.replace(A, 4, is_draft_computed=False)
    blocks.replace(D, 4, is_draft_computed=False)
    assert (blocks.cache.find(A), blocks.cache.find(D)) == (1, None)
