"""Decides which recurrent states are saved to checkpoints, and how long requests hold them.

A row of a step computes some positions of a request, and the worker can copy the state after each
of them. The engine requests copies at block boundaries only (blocks/checkpoints.py):

- at the last boundary of a prompt at which the same prompt can resume;
- every `state_interval` tokens of a long prompt. The distance is doubled until one prompt has at
  most a part of all checkpoints, so that it does not evict those of all others;
- where a prompt parts from others: if more of its blocks are cached than a checkpoint follows, at
  the end of these blocks (`Request.num_shared_columns`);
- at each boundary of the answer. The request holds only the last of these *rolling* checkpoints, so
  that the next turn of a conversation, or the same request after a preemption, can resume there. In
  a long answer it also holds the last one at a multiple of `state_interval`, in case the block
  before the newest one is evicted.

A save gets a checkpoint that nothing refers to. The older rolling checkpoint is freed only after
the step has committed and the save is confirmed: its position is among those that the request has
computed then. It is not if the position follows a wrong draft, if the row failed, or if the request
had ended. So a discarded step destroys no checkpoint that may be needed. There is one exception. If
no checkpoint can be allocated, the state after a known token replaces the one in the request's
older rolling checkpoint.

A rolling checkpoint is published when the request releases its blocks, the others as soon as their
blocks are.

K/V that moves (kv/) takes a state along:

- A request whose K/V other engines will read computes whole blocks only, and saves the state at its
  end. It is admitted with the checkpoint for this state, which its lease later holds besides the
  blocks.
- A fetch fills a checkpoint besides the blocks, with the state after the last of them. The request
  holds it like one that a step in flight saves. Until its first plan, the request also keeps the
  one that it starts with: that of its cached prefix, or the fetched one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine_core.blocks.pool import BlockPool
from engine_core.blocks.prefix_cache import Prefixes
from engine_core.kv.transfers import KVTransfers
from engine_core.requests.request import Request
from engine_core.schedule.inflight import InflightStep
from engine_core.schedule.plan import Schedule
from protocol.engine.messages import Limits
from protocol.worker.steps import NO_CHECKPOINT

PROMPT_SHARE = 8
"""One prompt saves at most 1 / PROMPT_SHARE of all checkpoints because of its length."""
ROLLING_SHARE = 2
"""A rolling checkpoint evicts a cached one only while requests hold less than 1 / ROLLING_SHARE of
all checkpoints. So if there are few of them, those of prompts remain."""


class Checkpointing:
    """Saves the states of the requests of one scheduler.

    interval   tokens between two checkpoints of a long prompt
    """

    def __init__(
        self,
        limits: Limits,
        interval: int,
        pool: BlockPool,
        prefixes: Prefixes,
        kv_transfers: KVTransfers,
    ) -> None:
        checkpoints = pool.cache.checkpoints
        assert checkpoints is not None, "the model has no state"
        self.pool = checkpoints
        self._size = limits.block_tokens
        self._interval = interval
        self._blocks = pool
        self._prefixes = prefixes
        self._kv_transfers = kv_transfers

    # ---- planning

    def read(self, request: Request, num_found: int, step: Schedule) -> None:
        """Let the request start with the state after its `num_found` cached blocks."""
        number = self.pool.use(request.hashes[num_found - 1]) if num_found else NO_CHECKPOINT
        step.checkpoints[request] = number
        if number:
            self.pool.share(number)
            step.reads.append(number)

    def read_kept(self, request: Request, step: Schedule) -> None:
        """Let a request whose fetch is over start with the checkpoint that it keeps."""
        number, request.kept_checkpoint = request.kept_checkpoint, NO_CHECKPOINT
        step.checkpoints[request] = number
        if number:
            step.reads.append(number)

    def keep_read(self, request: Request, step: Schedule) -> None:
        """Let a request that is bound later keep the checkpoint that it would start with in
        `step`."""
        request.kept_checkpoint = step.checkpoints.pop(request)
        if request.kept_checkpoint:
            self.pool.share(request.kept_checkpoint)

    def num_uncovered(self, request: Request) -> int:
        """Return how many tokens of an admitted request must be computed although their K/V was
        cached, because no checkpoint follows them."""
        return max(request.num_shared_columns * self._size - request.num_computed, 0)

    def plan_saves(self, step: Schedule) -> None:
        """Add the states to save to a step whose rows are complete. They may replace the states
        that its requests start with, because these are read first."""
        for number in step.reads:
            self.pool.release(number)
        size = self._size
        for request in [r for r in step.decodes if not (r.num_scheduled + 1) % size]:
            self._save(request, (request.num_scheduled + 1,), step)
        for request, drafts in step.drafted:
            first = request.num_scheduled // size * size + size
            end = request.num_scheduled + 1 + len(drafts)
            self._save(request, range(first, end + 1, size), step)
        for request, count in step.chunks:
            start = request.num_scheduled
            self._save(request, self._chunk_positions(request, start, start + count), step)

    def _chunk_positions(self, request: Request, start: int, end: int) -> list[int]:
        """Return after which positions to save the state, in a row that computes the positions
        [start, end) of known tokens. Later ones come first, because more tokens can be skipped
        there."""
        last, shared = self._prompt_end(request), request.num_shared_columns * self._size
        stride, newest = self._stride(last), end // self._size * self._size
        first = start // stride * stride + stride
        positions = set(range(first, min(end, last) + 1, stride))
        positions.update(position for position in (last, shared) if start < position <= end)
        if newest > max(start, last):
            positions.add(newest)
        return sorted(positions, reverse=True)

    def _save(self, request: Request, positions: Sequence[int], step: Schedule) -> None:
        """Allocate checkpoints for the states after `positions`, the most useful one first, as far
        as they are needed and checkpoints can be allocated."""
        saves: list[tuple[Request, int, int]] = []
        for position in positions:
            if position in request.checkpoints:  # reserved at the admission
                saves.append((request, position, request.checkpoints[position]))
                continue
            is_rolling = self._is_rolling(request, position)
            if is_rolling is None or (not is_rolling and self._is_cached(request, position)):
                continue
            total = self.pool.total
            number = self.pool.allocate(max_held=total // ROLLING_SHARE if is_rolling else total)
            if number is None and is_rolling and position <= request.num_ahead:
                number = self._take_older(request, position)
            if number is not None:
                request.checkpoints[position] = number
                saves.append((request, position, number))
        step.saves += sorted(saves, key=lambda save: save[1])

    def _take_older(self, request: Request, position: int) -> int | None:
        """Return the checkpoint of the request's oldest rolling one before `position`, which it
        gives up for a newer state; None if it holds none."""
        older = [p for p in request.checkpoints if p < position and self._is_rolling(request, p)]
        return request.checkpoints.pop(min(older)) if older else None

    def _is_rolling(self, request: Request, position: int) -> bool | None:
        """Return whether a checkpoint at this block boundary is a rolling one; None if none is
        saved there."""
        last = self._prompt_end(request)
        if position in (last, request.num_shared_columns * self._size):
            return False
        if position > last:
            return True
        return None if position % self._stride(last) else False

    def _prompt_end(self, request: Request) -> int:
        """Return the last block boundary at which the request's prompt can resume. Its last token
        is always computed. If other engines will read the prompt's K/V, it has no such token: they
        resume at its end."""
        num_last = 0 if request.kv_readers else 1
        return (request.prompt_tokens - num_last) // self._size * self._size

    def _stride(self, last: int) -> int:
        """Return the distance of the checkpoints of a prompt that can resume at `last`."""
        stride, most = self._interval, max(self.pool.total // PROMPT_SHARE, 1)
        while last // stride > most:
            stride *= 2
        return stride

    def _is_cached(self, request: Request, position: int) -> bool:
        """Return whether another request has cached this state. If so, it counts as used."""
        index = position // self._size - 1
        is_cached = index < len(request.hashes) and request.hashes[index] in self.pool
        if is_cached:
            self.pool.use(request.hashes[index])
        return is_cached

    # ---- K/V that moves

    def can_fetch(self, request: Request) -> bool:
        """Return whether a checkpoint can be allocated for the state that the request would fetch,
        besides the one that it reserves."""
        return self.pool.num_allocatable > self._num_reserved(request)

    def can_reserve(self, request: Request, yield_lease: Callable[[Request], bool]) -> bool:
        """Return whether the checkpoint that the request reserves can be allocated, after leases
        have yielded if necessary. `yield_lease` is as in `BlockTables.admit`."""
        while self.pool.num_allocatable < self._num_reserved(request):
            if not yield_lease(request):
                return False
        return True

    def reserve(self, request: Request) -> None:
        """Allocate the checkpoint for the end of an admitted request whose K/V other engines will
        read; see `can_reserve`."""
        if self._num_reserved(request):
            number = self.pool.allocate(max_held=self.pool.total)
            assert number is not None
            request.checkpoints[request.prompt_tokens] = number

    def _num_reserved(self, request: Request) -> int:
        return int(request.kv_readers > 0)

    def start_fetch(self, request: Request, num_tokens: int, step: Schedule) -> int:
        """Return a checkpoint for the state after the first `num_tokens` positions of a request,
        which a fetch will fill; see `can_fetch`. The request keeps the one that it would start with
        in `step`, in case the fetch fails."""
        self.keep_read(request, step)
        number = self.pool.allocate(max_held=self.pool.total)
        assert number is not None
        request.checkpoints[num_tokens] = number
        return number

    def on_fetch_over(self, request: Request, num_tokens: int, *, is_fetched: bool) -> None:
        """Let the request start with the state after `num_tokens` positions, if the fetch has
        filled its checkpoint; else free that checkpoint. Call it before blocks are published."""
        if not is_fetched:
            self._release(request, num_tokens)
            return
        self._release_kept(request)
        request.kept_checkpoint = request.checkpoints[num_tokens]
        self.pool.share(request.kept_checkpoint)

    def keep_for_lease(self, request: Request) -> int:
        """Return the checkpoint of the state after the whole prompt of a request, which the request
        keeps for its lease. The next plan saves the state, or an earlier one has."""
        number = request.checkpoints[request.prompt_tokens]
        self.pool.share(number)
        request.kept_checkpoint = number
        return number

    def _release_kept(self, request: Request) -> None:
        if request.kept_checkpoint:
            self.pool.release(request.kept_checkpoint)
            request.kept_checkpoint = NO_CHECKPOINT

    # ---- commit

    def on_published(self, request: Request, published: range) -> None:
        """Publish the checkpoints of the request that follow its newly `published` blocks, unless
        they are rolling ones."""
        self._replace_free(request, published)
        end = request.num_published * self._size
        for position in [position for position in request.checkpoints if position <= end]:
            if not self._is_rolling(request, position):
                self._publish(request, position)

    def on_committed(self, step: InflightStep) -> None:
        """Free the checkpoints whose save a committed step has not confirmed, and the rolling ones
        that a confirmed one replaces."""
        plan = step.plan
        if plan.save_slots is None or plan.save_lens is None or plan.save_checkpoints is None:
            return
        owners = dict(zip(plan.row_slots.tolist(), step.requests, strict=True))
        saves = zip(plan.save_slots.tolist(), plan.save_lens.tolist(), strict=True)
        numbers = plan.save_checkpoints.tolist()
        for (slot, position), number in zip(saves, numbers, strict=True):
            request = owners[slot]
            if request.checkpoints.get(position) != number:
                continue  # published, or the request has released its blocks
            if position > request.num_computed:
                self._release(request, position)
            elif self._is_rolling(request, position):
                self._release_older(request, position)

    def _release_older(self, request: Request, position: int) -> None:
        """Free the rolling checkpoints before the confirmed one at `position`, except the last one
        at a multiple of the interval."""
        for older in [p for p in request.checkpoints if p < position]:
            is_spare = older % self._interval == 0 < position % self._interval
            if not is_spare and self._is_rolling(request, older):
                self._release(request, older)

    def on_releasing(self, request: Request) -> int:
        """Publish what the request has computed, before it releases its blocks. Return the number
        of its leading blocks that a checkpoint follows."""
        self._release_kept(request)
        published = self._prefixes.publish_all(request)
        self._kv_transfers.publish(request, published)
        self._replace_free(request, published)
        for position in list(request.checkpoints):
            self._publish(request, position)
        return self.pool.num_covered(request.hashes, request.num_computed // self._size)

    def _publish(self, request: Request, position: int) -> None:
        """Publish a checkpoint of the request, or free it if it is of no use: the position was not
        computed after all, or the block before it is not cached."""
        is_valid = position <= request.num_computed
        content = request.hashes[position // self._size - 1] if is_valid else b""
        if is_valid and self._blocks.cache.find(content) is not None:
            number = request.checkpoints.pop(position)
            self.pool.publish(content, number)
            self._kv_transfers.publish_state(content, number)
        else:
            self._release(request, position)

    def _release(self, request: Request, position: int) -> None:
        self.pool.release(request.checkpoints.pop(position))

    def _replace_free(self, request: Request, published: range) -> None:
        """Let the `published` blocks of the request take the place of free blocks with the same
        content in the prefix cache.

        The request has computed them again because no checkpoint followed those. One does now, so
        they must not be the first to be evicted.
        """
        drafted = request.num_draft_computed if request.uses_draft_model else 0
        for index, content, block in self._prefixes.entries(request, published):
            is_drafted = (index + 1) * self._size <= drafted
            self._blocks.replace(content, block, is_draft_computed=is_drafted)
