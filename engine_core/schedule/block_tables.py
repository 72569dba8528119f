"""Block tables of requests: allocates their blocks, and frees those that a window has passed.

If the model has no window, a request is admitted with blocks for all its known tokens, and then
needs blocks only for the tokens that it generates.

If only some layers have a window, grouped_tables.py applies.

If all layers of the model have a window (`Limits.kv_window`), blocks before the window are
released when a step commits. Their entries in the block table become the null block. No step reads
them any more: a step in flight starts at `num_computed` or later, and the draft model, whose steps
may start earlier, is not used. A released block is reused by a later plan, after the steps in
flight.

So a request with a window never needs blocks for its whole text. It is admitted with blocks for a
window and one step, and grows during its prefill with the blocks that it releases. Other requests
may share the released blocks, so they may not be free. The next chunk is then shorter, and if there
is no block at all, the youngest request is preempted, as for a decode. A request that runs alone
can always continue, because the cache holds one window and the token after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine_core.blocks.pool import BlockPool
from engine_core.requests.request import Request, RequestPhase
from engine_core.schedule.columns import slot_column
from engine_core.schedule.plan import Schedule
from protocol.engine.kv_window import max_live_blocks, num_passed_blocks
from protocol.engine.messages import Limits
from protocol.worker.steps import NULL_BLOCK


class BlockTables:
    """Allocates and releases the blocks of requests in one pool."""

    #: Whether blocks are released while their request runs.
    frees_blocks: bool

    def __init__(self, limits: Limits, pool: BlockPool) -> None:
        self._pool = pool
        self._size = limits.block_tokens
        self._window = limits.kv_window
        self.frees_blocks = self._window is not None
        #: Most blocks allocated at an admission; None: blocks for all known tokens.
        self._max_first = max_live_blocks(limits.token_budget, self._size, self._window)

    def num_needed(self, request: Request, found: list[int] | None = None) -> int:
        """Return how many blocks must be allocated to admit the request.

        `found` are the blocks of its cached prefix; None: nothing is cached.
        """
        found = found or []
        missing = self._num_blocks(len(request.tokens)) - len(found)
        if self._max_first is None:
            return missing
        num_held = len(found) - found.count(NULL_BLOCK)
        return min(missing, self._max_first, self._pool.total - num_held)

    def admit(
        self, request: Request, found: list[int], yield_lease: Callable[[Request], bool]
    ) -> bool:
        """Allocate the first blocks of the request, after the cached blocks `found`.

        `yield_lease` ends a lease for the request, and returns whether one ended. Return False,
        without allocating any block, if too few are free even after leases have yielded.
        """
        num_passed = found.count(NULL_BLOCK)
        held, missing = found[num_passed:], self.num_needed(request, found)
        while missing > self._pool.num_free - sum(map(self._pool.is_free, held)):
            if not yield_lease(request):
                return False
        self._pool.share(held)
        fresh = self._pool.allocate(missing)
        assert fresh is not None
        request.blocks = found + fresh
        request.num_passed = request.num_passed_sent = num_passed
        return True

    def release(self, request: Request, num_useful: int | None = None) -> None:
        """Release all blocks of the request.

        `num_useful` is the number of leading columns that a checkpoint of the request's state
        follows. The blocks after them are evicted first. None: the model has no state.
        """
        if num_useful is None:
            self._pool.release(request.held_blocks)
        else:
            self._pool.release(request.held_after(num_useful), passed=True)
            self._pool.release(request.held_until(num_useful))
        request.blocks = []
        request.num_passed = request.num_passed_sent = 0

    def release_passed(self, request: Request) -> None:
        """Release the blocks that the window has passed, after a step has committed."""
        num_passed = num_passed_blocks(request.num_computed, self._size, self._window)
        passed = request.blocks[request.num_passed : num_passed]
        if passed:
            self._pool.release(passed)
            request.blocks[request.num_passed : num_passed] = [NULL_BLOCK] * len(passed)
            request.num_passed = num_passed

    def fresh_blocks(self, request: Request) -> list[int]:
        """Return the blocks of a newly admitted request that have no content yet: those after its
        cached prefix."""
        return request.blocks[-(-request.num_computed // self._size) :]

    def num_covered(self, request: Request) -> int:
        """Return how many positions the block table of the request covers."""
        return len(request.blocks) * self._size

    def needs_block(self, request: Request) -> bool:
        """Return whether the request is running, and lacks a block for its next token, or for the
        run that it computes next as a whole."""
        return (
            request.phase is RequestPhase.RUNNING
            and request.num_uncomputed > 0
            and request.least_end > self.num_covered(request)
        )

    def growing(self, requests: Iterable[Request]) -> list[Request]:
        """Return those `requests` that need a block for their next token (`needs_block`)."""
        size = self._size
        full = [r for r in requests if r.num_scheduled >= len(r.blocks) * size or r.whole_runs]
        return [request for request in full if self.needs_block(request)]

    def can_grow(self, requests: Sequence[Request]) -> bool:
        """Return whether enough blocks are free for the next tokens of all `requests`."""
        num_free = self._pool.num_free
        if self.frees_blocks:
            growing = self.growing(requests)
            return sum(self._num_lacking(r, r.least_end) for r in growing) <= num_free
        return len(requests) <= num_free or len(self.growing(requests)) <= num_free

    def grow_all(self, growing: Sequence[Request], step: Schedule) -> None:
        """Allocate the blocks that each of the requests `growing` needs to compute anything
        (`needs_block`), in their order. Enough blocks must be free. Calling `grow` for each of them
        has the same effect."""
        if self.frees_blocks:  # a run of a windowed model may need several blocks
            for request in growing:
                self.grow(request, request.least_end, step)
            return
        blocks = self._pool.allocate(len(growing))
        assert blocks is not None
        step.new_blocks += blocks
        slots = slot_column(growing)
        step.table_updates += [
            (slot, len(request.blocks), block)
            for slot, request, block in zip(slots, growing, blocks, strict=True)
        ]
        for request, block in zip(growing, blocks, strict=True):
            request.blocks.append(block)

    def max_positions(self, request: Request, *, reserved: int) -> int:
        """Return how many positions the request's block table can cover without a preemption,
        leaving enough free blocks for one more column of each of `reserved` other requests."""
        free = max(self._pool.num_free - reserved, 0)
        return (len(request.blocks) + free) * self._size

    def grow(self, request: Request, num_positions: int, step: Schedule) -> None:
        """Allocate the blocks that the first `num_positions` positions of the request lack. Enough
        blocks must be free."""
        has_grown = self.try_grow(request, num_positions, step)
        assert has_grown

    def grow_if_free(self, request: Request, num_positions: int, step: Schedule) -> int:
        """Allocate blocks for the first `num_positions` positions, as far as blocks are free.

        Return how many positions the block table then covers. It can be fewer than `num_positions`
        only in a model with a window: in others, a request gets blocks for all its known tokens at
        admission.
        """
        self.grow(request, min(num_positions, self.max_positions(request, reserved=0)), step)
        return self.num_covered(request)

    def try_grow(self, request: Request, num_positions: int, step: Schedule) -> bool:
        """Allocate the blocks that the first `num_positions` positions of a request lack.

        The request must have a slot. If it is admitted in this step, the blocks are part of its
        bind. Otherwise they are listed in `table_updates`. Return False, without allocating any
        block, if too few are free.
        """
        blocks = self._pool.allocate(self._num_lacking(request, num_positions))
        if blocks is None:
            return False
        assert request.slot is not None
        first = len(request.blocks)
        if request not in step.admitted:
            step.table_updates += [
                (request.slot, first + i, block) for i, block in enumerate(blocks)
            ]
        step.new_blocks += blocks
        request.blocks += blocks
        return True

    def plan_passed(self, step: Schedule) -> None:
        """Add table updates to `step` that replace the blocks passed by the window with the null
        block in the worker's block tables, for the requests of its rows."""
        for request, _, _ in step.rows():
            first, end = request.num_passed_sent, request.num_passed
            if first == end:
                continue
            assert request.slot is not None
            step.table_updates += [(request.slot, i, NULL_BLOCK) for i in range(first, end)]
            request.num_passed_sent = end

    def _num_lacking(self, request: Request, num_positions: int) -> int:
        """Return how many blocks the first `num_positions` positions lack."""
        return max(self._num_blocks(num_positions) - len(request.blocks), 0)

    def _num_blocks(self, num_positions: int) -> int:
        return -(-num_positions // self._size)
