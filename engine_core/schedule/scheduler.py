"""Who computes how many tokens in this step.

One token budget serves all work. Requests that need one token (they stream) go first, oldest first;
what is left of the budget goes to those that still compute their prompt, then to newcomers. So a
long prompt never stalls those who stream. When blocks run out, the youngest request is preempted:
it gives everything back and is computed again later, mostly out of the prefix cache.

That is so within one account. Between accounts, who was served least goes first (fair_share.py):
its newcomers before the prompts that others are computing. Where those who stream would make the
step in which it begins longer, they wait for that one, and never for two on end. And where a
newcomer finds no slot or no blocks, requests of accounts that were served more give way, youngest
first: those for which the difference is greater than what it will cost to compute them again. So
nobody can fill all slots for as long as his answers last, and two accounts do not take turns at
preempting each other.

A request is admitted only when blocks for all its known tokens are there; they are taken at once.
So only requests that stream ever need more, one block at a time, and the oldest can always get it.

Where more of a newcomer's K/V can be had from elsewhere than is here (kv/), it gets its slot and
blocks and is FETCHING: it waits in `unbound`, takes no part in steps and is nobody's victim. When
all has come that will come, it is bound with its first plan, as every newcomer is.

Last of all, what is left of the budget goes to drafts, guesses at the tokens that come next
(drafting.py): they are computed behind the last known token of a request that streams. They take
blocks only where every running request could still have one more. A block that was taken for drafts
stays with its request, whose answer will grow into it: nothing is undone where drafts were wrong.

A draft model computes prompts as they are computed, and answers a little later: in the steps that
want guesses of it, and where it has fallen behind by `FALL_BEHIND` tokens. It does not follow
requests for which it will hardly be asked. A block of one that it follows is published when both
have computed it.

Nobody is preempted while a plan is out: its tokens would be lost. `can_continue` says whether a
step can be planned without that.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import Protocol

from engine_core.blocks.hash import ContentHashes
from engine_core.blocks.pool import BlockPool
from engine_core.blocks.prefixes import Prefixes
from engine_core.kv.fetches import Match
from engine_core.kv.transfers import KVTransfers
from engine_core.policy.fair_share import FairShare
from engine_core.policy.queue import WaitingQueue
from engine_core.policy.turns import (
    is_due_before,
    paused_decodes,
    preemption_victims,
    prefill_order,
)
from engine_core.request import Request, RequestEvent, RequestPhase
from engine_core.schedule.decisions import DraftCatchUp, Schedule
from protocol.messages import Limits

FALL_BEHIND = 32
"""As cheap to compute at once as one by one would be dear."""


class Guessing(Protocol):
    """Who gets drafts, and how many (drafting.py)."""

    def propose(self, request: Request, most: int, rows: int) -> list[int]:
        """Up to `most` >= 1 drafts, in a step of so many rows."""
        ...

    def want(self, request: Request, most: int, rows: int) -> int:
        """How many guesses, up to `most` >= 1, a draft model is asked for."""
        ...


class Scheduler:
    """Owns running requests, slots and blocks. Knows nothing of clients, sampling or time."""

    def __init__(
        self,
        limits: Limits,
        hashes: ContentHashes,
        pool: BlockPool,
        exchange: KVTransfers,
        guessing: Guessing,
        step_costs: Sequence[tuple[int, float]] = (),
    ) -> None:
        self.shares = FairShare(limits, step_costs)
        self.waiting = WaitingQueue(self.shares)
        self.running: list[Request] = []  # by rank: oldest first
        self.unbound: list[Request] = []  # own slots that the worker does not know of yet
        self.pool = pool
        self.released_slots: list[int] = []  # to be told to the worker with the next plan
        self._free_slots = list(range(limits.max_slots - 1, -1, -1))
        self.limits = limits
        self.prefixes = Prefixes(limits, hashes, pool.cache)
        self._exchange = exchange
        self._guessing = guessing
        self._most = min(limits.max_slots, limits.token_budget)  # each runner gets its one token
        self._blocked_newcomer: Request | None = None  # was first, and found no room
        self._has_held_back = False  # somebody who streams, in the last step

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.unbound or len(self.waiting))

    def can_continue(self) -> bool:
        """Whether the next step needs no preemption."""
        growing = sum(map(self._must_grow, self.running))
        return growing <= self.pool.num_free and not self._fair_share_victims()

    def schedule(self, *, is_shared: bool = False) -> Schedule:
        """Decide one step and take what it needs. Empty if there is nothing to do. `is_shared`: of
        late, by several accounts."""
        step = Schedule(budget=self.limits.token_budget)
        self._make_room(step)
        num_yielded = len(step.preempted)
        self._continue_decodes(step)
        streams = step.decodes[:]
        self._bind_fetched(step, most=1)  # these are about to stream, too
        admits = len(step.preempted) == num_yielded
        spare = 0
        if is_shared:
            part = max(self.shares.part, len(streams))
            step.budget, spare = min(step.budget, part), min(len(streams), part - len(streams))
        self._continue_chunks(step, admits=admits, spare=spare)
        self._bind_fetched(step, most=self.limits.max_len)
        if admits:
            self._admit(step)
        if is_shared:
            self._hold_back(step, streams)
        self._draft(step)
        self._follow(step)
        return step

    def advance(self, request: Request, num_tokens: int) -> None:
        """The step that computed `num_tokens` more of a running request has committed."""
        request.num_computed += num_tokens
        self._publish(request)

    def arrive(self, request: Request, match: Match | None) -> None:
        """A request's fetch is over, and has brought what matched; None: nothing."""
        request.move(RequestEvent.ARRIVE)
        if match is None:
            return
        if not request.num_preemptions:
            request.num_cached = match.num_tokens
            if match.is_for_it:
                request.num_fetched = match.num_tokens - request.num_computed
        request.num_computed = request.num_scheduled = match.num_tokens
        self._publish(request)

    def finish(self, request: Request) -> None:
        """Take back everything a request owns; it must not be part of a step in flight, nor of a
        fetch."""
        if request.slot is not None:
            self._give_back(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    # ---- running

    def _hold_back(self, step: Schedule, streams: list[Request]) -> None:
        """Of these, whoever would make a newcomer's first step longer. What they have grown by
        stays theirs."""
        has_held_back, self._has_held_back = self._has_held_back, False
        if has_held_back or not step.admitted:
            return
        held = paused_decodes(streams, step.admitted[0])
        if held and self.shares.is_longer(step.num_tokens - len(held), len(held)):
            self._has_held_back = True
            step.decodes = [request for request in step.decodes if request not in held]

    def _continue_decodes(self, step: Schedule) -> None:
        for request in list(self.running):
            if step.budget == 0:
                return
            if (
                request.phase is RequestPhase.RUNNING
                and request.num_uncomputed == 1
                and self._grow(request, step)
            ):
                step.decodes.append(request)
                step.budget -= 1

    def _continue_chunks(self, step: Schedule, *, admits: bool, spare: int) -> None:
        """`admits`: newcomers of accounts that were served less go before, in a step that has no
        other prompts after them: it would take longer. `spare`: of the budget, for newcomers."""
        for request in prefill_order(self.running):
            if admits:
                num_admitted = len(step.admitted)
                self._admit(step, before=request)
                if len(step.admitted) > num_admitted:
                    step.budget = 0
            step.budget, spare = max(step.budget - spare, 0), 0
            if step.budget == 0:
                return
            self.shares.choose(request.share)
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
            request.phase is RequestPhase.RUNNING
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
            if self._exchange.make_way(request):
                continue
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
            drafts = self._guessing.propose(request, most, rows) if most > 0 else []
            if drafts:
                self._cover(request, len(request.tokens) + len(drafts), step)
                step.drafted.append((request, drafts))
                step.budget -= len(drafts)
            else:
                plain.append(request)
        step.decodes = plain

    def _room(self, request: Request, step: Schedule) -> int:
        """How many drafts there is budget, answer and memory for. The step samples one more token
        than drafts."""
        left = request.end - len(request.tokens) - 1
        return min(step.budget, left, self._coverable(request) - len(request.tokens))

    def _coverable(self, request: Request) -> int:
        """How many positions could have blocks, if nobody is to be preempted for it."""
        spare = max(self.pool.num_free - len(self.running), 0)
        return (len(request.blocks) + spare) * self.limits.block_tokens

    def _follow(self, step: Schedule) -> None:
        """Let the draft model compute what it lacks, and guess on, where guesses have room."""
        rows = list(step.rows())
        for request, count, drafts in rows:
            if not request.follows:
                continue
            known, start = request.num_scheduled + count - len(drafts), request.num_followed
            stride = min(known - start, self.limits.token_budget)
            wanted = 0
            if request.is_sampled(count) and start + stride == known:
                ahead = known + len(drafts)  # all may be right
                room = min(request.end - ahead - 2, self._coverable(request) - ahead)
                wanted = self._guessing.want(request, room, len(rows)) if room > 0 else 0
            if wanted:
                self._cover(request, ahead + wanted, step)
                step.followed[request] = DraftCatchUp(start, 0, wanted)
            elif count - len(drafts) > 1 or stride >= FALL_BEHIND:
                step.followed[request] = DraftCatchUp(start, stride, 0)
            else:
                continue
            request.num_followed = start + stride

    def _cover(self, request: Request, num_positions: int, step: Schedule) -> None:
        """Take the blocks that are missing, of those that `_coverable` has counted."""
        needed = -(-num_positions // self.limits.block_tokens)
        blocks = self.pool.take(max(needed - len(request.blocks), 0))
        assert blocks is not None
        self._append(request, blocks, step)

    def _append(self, request: Request, blocks: list[int], step: Schedule) -> None:
        """Blocks for a request that holds a slot. One that has it since this step is bound with all
        its blocks."""
        assert request.slot is not None
        first = len(request.blocks)
        if request not in step.admitted:
            step.grown += [(request.slot, first + i, block) for i, block in enumerate(blocks)]
        step.fresh += blocks
        request.blocks += blocks

    def _preempt(self, victim: Request, step: Schedule) -> None:
        assert not victim.num_in_flight, "what a plan that is out computes would be lost"
        victim.move(RequestEvent.PREEMPT)
        victim.num_preemptions += 1
        self._give_back(victim)
        self.waiting.push(victim)
        step.preempted.append(victim)

    def _publish(self, request: Request) -> None:
        if published := self.prefixes.publish(request):
            self._exchange.publish(request, published)

    def _give_back(self, request: Request) -> None:
        assert request.slot is not None
        self._exchange.leave(request)
        if request in self.unbound:
            self.unbound.remove(request)
        else:
            self.running.remove(request)
            self.released_slots.append(request.slot)
        self._free_slots.append(request.slot)
        self.pool.release(request.blocks)
        request.slot = None
        request.blocks = []
        request.num_computed = request.num_scheduled = request.num_followed = 0
        request.num_published = 0
        if request.num_generated == 0:
            request.prompt_logprobs = []  # they will be computed again

    # ---- waiting

    def _admit(self, step: Schedule, before: Request | None = None) -> None:
        """Newcomers; `before`: only of accounts that were served less than this one's."""
        while (request := self.waiting.first()) is not None:
            if before is not None and not is_due_before(request, before):
                return
            if not self._has_slot:
                self._blocked_newcomer = request
                return
            found = self.prefixes.find(request)
            match = self._exchange.match(request, len(found))
            if match is None and not step.budget:
                return  # what is fetched needs none
            if not self._take_blocks(request, found):
                self._blocked_newcomer = request
                return
            self.shares.choose(request.share)
            self.waiting.remove(request)
            request.slot = self._free_slots.pop()
            if match is None:
                self._bind(request, step)
            else:
                self._fetch(request, match)

    @property
    def _has_slot(self) -> bool:
        return len(self.running) + len(self.unbound) < self._most

    def _make_room(self, step: Schedule) -> None:
        """For the one that is first, and found none."""
        victims = self._fair_share_victims()
        request, self._blocked_newcomer = self._blocked_newcomer, None
        for victim in victims:
            assert request is not None
            if self._has_slot and self._num_missing(request) <= self.pool.num_free:
                return
            self._preempt(victim, step)

    def _fair_share_victims(self) -> list[Request]:
        """Those who give way to it, youngest first; nobody where that would not help."""
        request = self._blocked_newcomer
        if request is None or request is not self.waiting.first():
            return []
        victims = preemption_victims(request, self.running)
        could_be_free = self.pool.num_free + sum(len(other.blocks) for other in victims)
        return victims if self._num_missing(request) <= could_be_free else []

    def _num_missing(self, request: Request) -> int:
        """Blocks, where none of its beginning is here already."""
        return -(-len(request.tokens) // self.limits.block_tokens)

    def _fetch(self, request: Request, match: Match) -> None:
        request.move(RequestEvent.FETCH)
        self.unbound.append(request)
        first = request.num_published
        self._exchange.begin(request, match, request.blocks[first : first + match.num_blocks])

    def _bind_fetched(self, step: Schedule, most: int) -> None:
        """Of those whose fetch is over, the ones with no more than `most` tokens to compute."""
        for request in list(self.unbound):
            if step.budget == 0:
                return
            if request.phase is RequestPhase.READY and request.num_uncomputed <= most:
                self.unbound.remove(request)
                self._bind(request, step)

    def _bind(self, request: Request, step: Schedule) -> None:
        """The first step of a request in this life. Blocks without content are to be zeroed."""
        request.move(RequestEvent.ADMIT)
        insort(self.running, request, key=lambda other: other.rank)
        request.num_charged = max(request.num_charged, request.num_computed)
        step.admitted.append(request)
        step.fresh += request.blocks[-(-request.num_computed // self.limits.block_tokens) :]
        self._compute(request, step)

    def _take_blocks(self, request: Request, found: list[int]) -> bool:
        """Blocks for all known tokens, of which those that were `found` are here already.

        False, and no change, if too few.
        """
        missing = -(-len(request.tokens) // self.limits.block_tokens) - len(found)
        while missing > self.pool.num_free - sum(map(self.pool.is_free, found)):
            if not self._exchange.make_way(request):
                return False
        self.pool.share(found)
        fresh = self.pool.take(missing)
        assert fresh is not None
        request.blocks = found + fresh
        request.num_computed = request.num_scheduled = len(found) * self.limits.block_tokens
        known = self.pool.cache.num_followed(found) if request.follows else len(found)
        request.num_followed = known * self.limits.block_tokens
        request.num_published = known
        if not request.num_preemptions:
            request.num_cached = request.num_computed
        return True
