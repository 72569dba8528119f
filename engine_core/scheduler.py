"""Who computes how many tokens in this step.

One token budget serves all work. Requests that need one token (they stream) go first, oldest first;
what is left of the budget goes to those that still compute their prompt, then to newcomers. So a
long prompt never stalls those who stream. When blocks run out, the youngest request is preempted:
it gives everything back and is computed again later, mostly out of the prefix cache.

A request is admitted only when blocks for all its known tokens are there; they are taken at once.
So only requests that stream ever need more, one block at a time, and the oldest can always get it.

Last of all, what is left of the budget goes to drafts, guesses at the tokens that come next
(speculation.py): they are computed behind the last known token of a request that streams. They take
blocks only where every running request could still have one more. A block that was taken for drafts
stays with its request, whose answer will grow into it: nothing is undone where drafts were wrong.

Nobody is preempted while a plan is out: its tokens would be lost. `can_continue` says whether a
step can be planned without that.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from engine_core.block_hash import extend_hashes, root_hash
from engine_core.block_pool import BlockPool
from engine_core.prefix_cache import PrefixCache
from engine_core.queue import WaitingQueue
from engine_core.request import Event, Phase, Request
from protocol.messages import Limits

Propose = Callable[[Request, int, int], list[int]]
"""(request, most >= 1, rows of the step) -> drafts, up to so many."""


def propose_nothing(request: Request, most: int, rows: int) -> list[int]:
    return []


@dataclass(slots=True)
class Schedule:
    """What one step will do.

    decodes    requests of one token each;  chunks: (request, how many tokens, at least 2)
    drafted    (request, its drafts, at least one): one token each, and as many as drafts
    admitted   newly RUNNING, in order;  preempted: newly PREEMPTED
    grown      (slot, index in the block table, block) for requests that held a slot before
    fresh      blocks taken for new content: to be zeroed
    """

    decodes: list[Request] = field(default_factory=list)
    chunks: list[tuple[Request, int]] = field(default_factory=list)
    drafted: list[tuple[Request, list[int]]] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    grown: list[tuple[int, int, int]] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    budget: int = 0


class Scheduler:
    """Owns running requests, slots and blocks. Knows nothing of clients, sampling or time."""

    def __init__(
        self, limits: Limits, model_digest: str, propose: Propose = propose_nothing
    ) -> None:
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # by rank: oldest first
        self.cache = PrefixCache()
        self.pool = BlockPool(limits.num_blocks, self.cache)
        self.released_slots: list[int] = []  # to be told to the worker with the next plan
        self._free_slots = list(range(limits.max_slots - 1, -1, -1))
        self.limits = limits
        self.model_digest = model_digest
        self._propose = propose
        self._roots: dict[str, bytes] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self.waiting))

    def can_continue(self) -> bool:
        """Whether the next step needs no preemption."""
        growing = sum(map(self._must_grow, self.running))
        return growing <= self.pool.num_free

    def schedule(self) -> Schedule:
        """Decide one step and take what it needs. Empty if there is nothing to do."""
        step = Schedule(budget=self.limits.token_budget)
        self._continue_decodes(step)
        self._continue_chunks(step)
        if not step.preempted:
            self._admit(step)
        self._draft(step)
        return step

    def advance(self, request: Request, num_tokens: int) -> None:
        """The step that computed `num_tokens` more of a running request has committed."""
        request.num_computed += num_tokens
        if self.limits.prefix_cache:
            self._publish(request)

    def finish(self, request: Request) -> None:
        """Take back everything a request owns; it must not be part of a step in flight."""
        if request.slot is not None:
            self._give_back(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    # ---- running

    def _continue_decodes(self, step: Schedule) -> None:
        for request in list(self.running):
            if step.budget == 0:
                return
            if (
                request.phase is Phase.RUNNING
                and request.num_uncomputed == 1
                and self._grow(request, step)
            ):
                step.decodes.append(request)
                step.budget -= 1

    def _continue_chunks(self, step: Schedule) -> None:
        for request in self.running:
            if step.budget == 0:
                return
            if request.phase is Phase.RUNNING and request.num_uncomputed > 1:
                self._compute(request, step)

    def _compute(self, request: Request, step: Schedule) -> None:
        count = min(request.num_uncomputed, step.budget)
        if count == 1:
            step.decodes.append(request)
        else:
            step.chunks.append((request, count))
        step.budget -= count

    def _must_grow(self, request: Request) -> bool:
        """It streams, and there is no block for its last token."""
        return (
            request.phase is Phase.RUNNING
            and request.num_uncomputed == 1
            and request.num_ahead > len(request.blocks) * self.limits.block_tokens
        )

    def _grow(self, request: Request, step: Schedule) -> bool:
        """Make sure there is a block for the last token.

        False if the request had to yield itself.
        """
        if not self._must_grow(request):
            return True
        while (blocks := self.pool.take(1)) is None:
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is request:
                return False
        self._append(request, blocks, step)
        return True

    def _draft(self, step: Schedule) -> None:
        """Guess ahead for those that stream and whose tokens are all known."""
        rows, plain = len(step.decodes) + len(step.chunks), []
        for request in step.decodes:
            is_known = request.num_uncomputed == 1 and not request.num_pending
            most = self._room(request, step) if is_known else 0
            drafts = self._propose(request, most, rows) if most > 0 else []
            if drafts:
                self._cover(request, len(drafts), step)
                step.drafted.append((request, drafts))
                step.budget -= len(drafts)
            else:
                plain.append(request)
        step.decodes = plain

    def _room(self, request: Request, step: Schedule) -> int:
        """How many drafts there is budget, answer and memory for. The step samples one more token
        than drafts; a request that was admitted just now has no blocks to grow by."""
        spare = max(self.pool.num_free - len(self.running), 0) * (request not in step.admitted)
        covered = (len(request.blocks) + spare) * self.limits.block_tokens
        left = request.end - len(request.tokens) - 1
        return min(step.budget, left, covered - len(request.tokens))

    def _cover(self, request: Request, num_drafts: int, step: Schedule) -> None:
        """Take the blocks for drafts, which `_room` has found to be there."""
        needed = -(-(len(request.tokens) + num_drafts) // self.limits.block_tokens)
        blocks = self.pool.take(max(needed - len(request.blocks), 0))
        assert blocks is not None
        self._append(request, blocks, step)

    def _append(self, request: Request, blocks: list[int], step: Schedule) -> None:
        """Blocks for a request that holds a slot."""
        assert request.slot is not None
        first = len(request.blocks)
        step.grown += [(request.slot, first + i, block) for i, block in enumerate(blocks)]
        step.fresh += blocks
        request.blocks += blocks

    def _preempt(self, victim: Request, step: Schedule) -> None:
        assert not victim.num_in_flight, "what a plan that is out computes would be lost"
        victim.move(Event.PREEMPT)
        victim.num_preemptions += 1
        self._give_back(victim)
        self.waiting.push(victim)
        step.preempted.append(victim)

    def _give_back(self, request: Request) -> None:
        assert request.slot is not None
        self.running.remove(request)
        self._free_slots.append(request.slot)
        self.released_slots.append(request.slot)
        self.pool.release(request.blocks)
        request.slot = None
        request.blocks = []
        request.num_computed = request.num_scheduled = 0
        request.num_published = 0
        if request.num_generated == 0:
            request.prompt_logprobs = []  # they will be computed again

    # ---- waiting

    def _admit(self, step: Schedule) -> None:
        # Every running request must get its one token in a step: no more of them than the budget
        # has.
        most = min(self.limits.max_slots, self.limits.token_budget)
        while step.budget and len(self.running) < most:
            request = self.waiting.first()
            if request is None or not self._take_blocks(request, step):
                return
            self.waiting.remove(request)
            request.move(Event.ADMIT)
            request.slot = self._free_slots.pop()
            insort(self.running, request, key=lambda other: other.rank)
            step.admitted.append(request)
            self._compute(request, step)

    def _take_blocks(self, request: Request, step: Schedule) -> bool:
        """Blocks for all known tokens, as many as possible from the cache.

        False, and no change, if too few.
        """
        needed = -(-len(request.tokens) // self.limits.block_tokens)
        found = self._find_cached(request)
        free_after_sharing = self.pool.num_free - sum(map(self.pool.is_free, found))
        if needed - len(found) > free_after_sharing:
            return False
        self.pool.share(found)
        fresh = self.pool.take(needed - len(found))
        assert fresh is not None
        step.fresh += fresh
        request.blocks = found + fresh
        request.num_computed = request.num_scheduled = len(found) * self.limits.block_tokens
        request.num_published = len(found)
        if not request.num_preemptions:
            request.num_cached = request.num_computed
        return True

    def _find_cached(self, request: Request) -> list[int]:
        # The last token is always computed: its logits are what a step is for. A request that wants
        # its
        # prompt's logprobs computes the whole prompt for the same reason.
        if not self.limits.prefix_cache or request.params.prompt_logprobs is not None:
            return []
        usable = (len(request.tokens) - 1) // self.limits.block_tokens
        self._hash(request, usable)
        return self.cache.match(request.hashes[:usable])

    # ---- the prefix cache

    def _hash(self, request: Request, num_blocks: int) -> None:
        root = self._roots.get(request.namespace)
        if root is None:
            root = root_hash(self.model_digest, request.namespace)
            if len(self._roots) < 1024:
                self._roots[request.namespace] = root
        extend_hashes(request.hashes, root, request.tokens, self.limits.block_tokens, num_blocks)

    def _publish(self, request: Request) -> None:
        full = request.num_computed // self.limits.block_tokens
        if full > request.num_published:
            self._hash(request, full)
            for index in range(request.num_published, full):
                self.cache.publish(request.hashes[index], request.blocks[index])
            request.num_published = full
