"""The laws of slots, blocks and the prefix cache, checked by brute force.

For tests and `check()`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from engine_core.block_hash import extend_hashes, root_hash
from engine_core.request import Phase, Request
from engine_core.scheduler import Scheduler
from protocol.steps import NULL_BLOCK


def check_invariants(
    scheduler: Scheduler, open_requests: Iterable[Request], ended_in_flight: Collection[Request]
) -> None:
    """Raises AssertionError naming the law that does not hold."""
    running = scheduler.running
    assert running == sorted(running, key=lambda request: request.rank), "running is not in order"
    for request in open_requests:
        is_running = request.phase is Phase.RUNNING
        assert (request in running) == is_running, f"{request.number} is running in one place only"
        is_queued = not is_running and request.phase is not Phase.ARRIVED
        assert (request in scheduler.waiting) == is_queued, f"{request.number} is in the queue"
    assert set(running) >= set(ended_in_flight), "a request that ended in flight lost its blocks"
    _check_slots(scheduler, running)
    _check_blocks(scheduler, running)
    _check_content(scheduler, running)


def _check_slots(scheduler: Scheduler, running: list[Request]) -> None:
    slots = [request.slot for request in running] + scheduler._free_slots
    assert sorted(slots, key=str) == sorted(range(scheduler.limits.max_slots), key=str), "slots"


def _check_blocks(scheduler: Scheduler, running: list[Request]) -> None:
    pool = scheduler.pool
    holders = Counter(block for request in running for block in request.blocks)
    assert NULL_BLOCK not in holders, "the null block is held"
    for block in range(1, len(pool.holders)):
        assert pool.holders[block] == holders[block], f"block {block}: holders"
        assert pool.is_free(block) == (not holders[block]), f"block {block}: free xor held"
    for request in running:
        covered = len(request.blocks) * scheduler.limits.block_tokens
        assert covered >= request.num_computed, f"{request.number}: computed beyond its blocks"
        assert 0 <= request.num_computed <= len(request.tokens), f"{request.number}: counts"
        ahead = request.num_scheduled - request.num_computed
        assert ahead >= 0, f"{request.number}: scheduled less than was computed"
        assert covered >= request.num_scheduled, f"{request.number}: scheduled beyond its blocks"
        is_out = bool(ahead or request.num_pending)
        assert is_out == bool(request.num_in_flight), f"{request.number}: in flight"


def _check_content(scheduler: Scheduler, running: list[Request]) -> None:
    """Findable blocks that are held hold what their hash says, and it is committed."""
    size = scheduler.limits.block_tokens
    findable = scheduler.cache.items()
    for request in running:
        fresh: list[bytes] = []
        root = root_hash(scheduler.model_digest, request.namespace)
        extend_hashes(fresh, root, request.tokens, size, len(request.tokens) // size)
        for index, block in enumerate(request.blocks):
            if block in findable:
                assert findable[block] == fresh[index], f"block {block}: content"
                assert (index + 1) * size <= request.num_computed, f"block {block}: not yet written"
