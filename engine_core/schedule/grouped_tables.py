"""Block tables of a model in which only some layers have a window (`KVGroups`).

A column of a block table stands for `block_tokens` positions. It has one block for the layers
without a window, and several for the layers with one. All blocks have the same size and come from
one pool. So a request is admitted with the blocks of both kinds or with none, and memory that one
kind does not need serves the other.

A request is admitted with the blocks of the layers without a window for all its known tokens. The
other blocks are those of a window and one step, as in a model all of whose layers have a window:
they are released when the window has passed them, and the request grows during its prefill. A
request that runs alone can always continue, because the cache has room for the longest request: all
its blocks of the layers without a window, and the other blocks for one window and the token after
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine_core.blocks.pool import BlockPool
from engine_core.requests.request import Request
from engine_core.schedule.block_tables import BlockTables
from engine_core.schedule.plan import Schedule
from protocol.engine.kv_window import KVGroups, max_live_blocks, num_passed_blocks
from protocol.engine.messages import Limits
from protocol.worker.steps import NULL_BLOCK


class GroupedBlockTables(BlockTables):
    """BlockTables for a model with K/V groups: each column of a block table has several blocks."""

    def __init__(self, limits: Limits, pool: BlockPool, groups: KVGroups) -> None:
        super().__init__(limits, pool)
        self._window = groups.window
        self.frees_blocks = True
        #: Number of blocks per column for the layers with a window.
        self._num_window = groups.window_blocks
        self._width = 1 + groups.window_blocks
        #: Most columns that get blocks for the layers with a window at an admission.
        self._max_first = max_live_blocks(limits.token_budget, self._size, groups.window)

    def num_needed(self, request: Request, found: list[int] | None = None) -> int:
        found = found or []
        missing, first = self._num_missing(request, len(found))
        return missing + first * self._num_window

    def admit(
        self, request: Request, found: list[int], yield_lease: Callable[[Request], bool]
    ) -> bool:
        num_passed = num_passed_blocks(len(found) * self._size, self._size, self._window)
        columns = self._pool.cache.window_columns(
            request.hashes[num_passed : len(found)], self._num_window
        )
        held = [*found, *(block for column in columns for block in column)]
        missing, first = self._num_missing(request, len(found))
        needed = missing + first * self._num_window
        while needed > self._pool.num_free - sum(map(self._pool.is_free, held)):
            if not yield_lease(request):
                return False
        self._pool.share(held)
        fresh = self._pool.allocate(needed)
        assert fresh is not None
        request.blocks = found + fresh[:missing]
        fresh_columns = self._columns(fresh[missing:])
        passed = [[NULL_BLOCK] * self._num_window] * num_passed
        request.window_tables = [*map(list, zip(*passed, *columns, *fresh_columns, strict=True))]
        request.num_passed = request.num_passed_sent = num_passed
        return True

    def release(self, request: Request, num_useful: int | None = None) -> None:
        super().release(request, num_useful)
        request.window_tables = []

    def release_passed(self, request: Request) -> None:
        num_passed = num_passed_blocks(request.num_computed, self._size, self._window)
        first = request.num_passed
        if num_passed <= first:
            return
        shared = request.num_shared_columns
        in_window = num_passed_blocks(shared * self._size, self._size, self._window)
        for table in request.window_tables:
            self._pool.prove(table[max(first, in_window) : min(num_passed, shared)])
            self._pool.release(table[first:num_passed], passed=True)
            table[first:num_passed] = [NULL_BLOCK] * (num_passed - first)
        request.num_passed = num_passed

    def fresh_blocks(self, request: Request) -> list[int]:
        first = -(-request.num_computed // self._size)
        tables = (request.blocks, *request.window_tables)
        return [block for table in tables for block in table[first:]]

    def num_covered(self, request: Request) -> int:
        return len(request.window_tables[0]) * self._size

    def growing(self, requests: Iterable[Request]) -> list[Request]:
        return [request for request in requests if self.needs_block(request)]

    def max_positions(self, request: Request, *, reserved: int) -> int:
        free = max(self._pool.num_free - reserved * self._width, 0)
        num_columns = len(request.window_tables[0])
        behind = len(request.blocks) - num_columns
        if free <= behind * self._num_window:
            return (num_columns + free // self._num_window) * self._size
        further = (free - behind * self._num_window) // self._width
        return (num_columns + behind + further) * self._size

    def try_grow(self, request: Request, num_positions: int, step: Schedule) -> bool:
        blocks = self._pool.allocate(self._num_lacking(request, num_positions))
        if blocks is None:
            return False
        assert request.slot is not None
        end, num_columns = self._num_blocks(num_positions), len(request.window_tables[0])
        num_full = max(end - len(request.blocks), 0)
        full, columns = blocks[:num_full], self._columns(blocks[num_full:])
        if request not in step.admitted:
            first = len(request.blocks)
            step.table_updates += [
                (request.slot, (first + i) * self._width, block) for i, block in enumerate(full)
            ]
            step.table_updates += [
                (request.slot, (num_columns + i) * self._width + 1 + j, block)
                for i, column in enumerate(columns)
                for j, block in enumerate(column)
            ]
        step.new_blocks += blocks
        request.blocks += full
        for j, table in enumerate(request.window_tables):
            table += [column[j] for column in columns]
        return True

    def plan_passed(self, step: Schedule) -> None:
        for request, _, _ in step.rows():
            first, end = request.num_passed_sent, request.num_passed
            if first == end:
                continue
            assert request.slot is not None
            step.table_updates += [
                (request.slot, column * self._width + 1 + j, NULL_BLOCK)
                for column in range(first, end)
                for j in range(self._num_window)
            ]
            request.num_passed_sent = end

    def _num_missing(self, request: Request, num_found: int) -> tuple[int, int]:
        """Return how many columns to allocate at an admission: (for the layers without a window,
        for the layers with one)."""
        missing = self._num_blocks(len(request.tokens)) - num_found
        num_passed = num_passed_blocks(num_found * self._size, self._size, self._window)
        num_held = num_found + (num_found - num_passed) * self._num_window
        room = (self._pool.total - num_held - missing) // self._num_window
        assert self._max_first is not None
        return missing, min(missing, self._max_first, room)

    def _num_lacking(self, request: Request, num_positions: int) -> int:
        end = self._num_blocks(num_positions)
        behind = max(end - len(request.window_tables[0]), 0)
        return max(end - len(request.blocks), 0) + behind * self._num_window

    def _columns(self, blocks: list[int]) -> list[list[int]]:
        """Split `blocks`, which are for the layers with a window, into columns."""
        size = self._num_window
        return [blocks[i : i + size] for i in range(0, len(blocks), size)]
