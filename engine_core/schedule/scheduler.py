"""The scheduler: decides how many tokens each request computes in a step.

One token budget covers all work, in this order:

1. Decodes: running requests that compute one token each, oldest first.
2. Prefills: running requests that are still computing their prompt, in chunks.
3. Newcomers: the requests at the front of the queue.

So a long prompt never stalls the decodes. If blocks run out, the youngest request is preempted: it
releases its slot and blocks, and is computed again later, mostly from the prefix cache.

Between accounts, the one served least goes first (policy/fair_share.py):

- Its newcomers go before the prefills of other accounts.
- If the decodes would make a newcomer's first step longer, the decodes of accounts served more
  pause for that step, but never for two steps in a row.
- If there is no slot, or too few blocks, for a newcomer, requests of accounts served more are
  preempted, youngest first. This happens only if the difference in service exceeds the cost of
  computing them again. So long answers of one account cannot hold all slots, and two accounts do
  not preempt each other in turn.

A request is admitted only if blocks for all its known tokens can be allocated at once, or for a
window and one step if the model frees the blocks before its window (block_tables.py). After that it
needs blocks only for its next tokens, one block at a time, and the oldest request can always get
one.

If more of a newcomer's K/V can be fetched (kv/) than is in the prefix cache, the newcomer gets its
slot and blocks and becomes FETCHING. It then waits in `unbound`, is in no plan and is never
preempted. When the fetch is over, it is bound with its first plan, like any newcomer. A newcomer
whose next position is that of an image waits in the same way, until the worker has encoded the
image (images/).

The rest of the budget goes to drafts (drafting.py).

Positions that see each other (requests/whole_runs.py) are computed in one step. If they do not fit
into what is left of a step, they wait for one in which they are the first chunk.

No request is preempted while a plan in flight contains it, because the tokens being sampled would
be lost. `can_continue` returns whether the next step can be planned without preemption.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from itertools import chain

from engine_core.blocks.hash import ContentHashes
from engine_core.blocks.pool import BlockPool
from engine_core.blocks.prefix_cache import Prefixes
from engine_core.images.rows import ImageRows
from engine_core.kv.fetches import Match
from engine_core.kv.transfers import KVTransfers
from engine_core.policy.fair_share import (
    FairShare,
    goes_before,
    paused_decodes,
    preemption_victims,
    prefill_order,
)
from engine_core.policy.queue import WaitingQueue
from engine_core.requests.request import Request, RequestEvent, RequestPhase
from engine_core.requests.whole_runs import least_end
from engine_core.schedule.block_tables import BlockTables
from engine_core.schedule.checkpointing import Checkpointing
from engine_core.schedule.columns import running_column, uncomputed_column
from engine_core.schedule.drafting import DraftPlanning
from engine_core.schedule.grouped_tables import GroupedBlockTables
from engine_core.schedule.plan import Schedule
from engine_core.schedule.slot_pool import SlotPool
from engine_core.speculation.draft_policy import Speculation
from protocol.engine.messages import Limits
from protocol.engine.timeline import Lack


class Scheduler:
    """Owns the waiting and running requests, the slots and the blocks.

    It has no clock, and does not deal with clients or sampling.
    """

    def __init__(
        self,
        limits: Limits,
        hashes: ContentHashes,
        pool: BlockPool,
        kv_transfers: KVTransfers,
        speculation: Speculation,
        images: ImageRows,
        step_costs: Sequence[tuple[int, float]] = (),
        state_interval: int = 0,
    ) -> None:
        self.fair_share = FairShare(limits, step_costs)
        self.waiting = WaitingQueue(self.fair_share)
        #: Requests in phase RUNNING, and ended ones in a step in flight, by rank: oldest first.
        self.running: list[Request] = []
        #: Requests that own a slot which the worker has not bound yet: FETCHING, READY, or ended
        #: while their fetch is not reported.
        self.unbound: list[Request] = []
        self.pool = pool
        self.tables = (
            BlockTables(limits, pool)
            if limits.kv_groups is None
            else GroupedBlockTables(limits, pool, limits.kv_groups)
        )
        self.slots = SlotPool(limits.max_slots)
        self.limits = limits
        self.prefixes = Prefixes(limits, hashes, pool.cache)
        #: None: the model has no state, or prefixes are not shared.
        self.checkpointing = (
            None
            if pool.cache.checkpoints is None
            else Checkpointing(limits, state_interval, pool, self.prefixes, kv_transfers)
        )
        self._kv_transfers = kv_transfers
        self._images = images
        self._drafts = DraftPlanning(limits, self.tables, speculation)
        #: Each running request needs at least one token of the budget per step.
        self._max_running = min(limits.max_slots, limits.token_budget)
        #: The first request in the queue, if the last step had no slot or too few blocks for it.
        self._blocked_newcomer: Request | None = None
        #: Whether the last step paused decodes.
        self._has_paused_decodes = False
        #: Tokens of running prompts that the last step left for later steps.
        self.num_prefill_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.unbound or len(self.waiting))

    @property
    def lack(self) -> Lack:
        """The resource that kept the last step from admitting the first request in the queue:
        "slot" or "blocks". "" if no resource did, or the queue is empty."""
        if self._blocked_newcomer is None:
            return ""
        return "blocks" if self._has_slot else "slot"

    def can_continue(self) -> bool:
        """Return whether the next step can be planned without preemption."""
        return self.tables.can_grow(self._able_to_run()) and not self._fair_share_victims()

    def schedule(self, *, is_shared: bool = False) -> Schedule:
        """Decide one step, and allocate the slots and blocks that it needs.

        The result has no rows if no request can compute anything. `is_shared` is whether several
        accounts sent requests recently (`FairShare.is_shared`).
        """
        step = Schedule(budget=self.limits.token_budget)
        if self._blocked_newcomer is not None:
            self._preempt_for_newcomer(step)
        num_preempted = len(step.preempted)
        prefills = self._schedule_decodes(step)
        decodes = step.decodes[:]
        if self.unbound:
            self._bind_fetched(step, max_tokens=1)  # in effect, these are decodes
        may_admit = len(step.preempted) == num_preempted
        reserved = 0
        if is_shared:
            max_tokens = max(self.fair_share.shared_prefill_budget, len(decodes))
            step.budget = min(step.budget, max_tokens)
            reserved = min(len(decodes), max_tokens - len(decodes))
        self._schedule_prefills(step, prefills, may_admit=may_admit, reserved=reserved)
        if self.unbound and self._bind_fetched(step, max_tokens=self.limits.max_len):
            may_admit = False  # newcomers would take the room that a whole run waits for
        if may_admit:
            self._admit(step)
        if is_shared:
            self._pause_decodes(step, decodes)
        self._drafts.add_to(step, self.running)
        if self.checkpointing is not None:
            self.checkpointing.plan_saves(step)
        if self.tables.frees_blocks:
            self.tables.plan_passed(step)
        if self._images.content.users:
            self._images.encode_next([*self.running, *self.unbound])
            self._images.note_waits(self.running)
        prompts = chain(prefills, step.admitted) if prefills or step.admitted else ()
        left = sum([request.num_uncomputed for request in prompts])
        self.num_prefill_tokens = max(0, left - sum([count for _, count in step.chunks]))
        return step

    def advance(self, request: Request, num_tokens: int) -> None:
        """Apply a committed step that computed `num_tokens` of a running request."""
        request.num_computed += num_tokens
        self._publish(request)
        if self.tables.frees_blocks:
            self.tables.release_passed(request)

    def on_fetch_over(self, request: Request, match: Match, *, is_fetched: bool) -> None:
        """Make a request READY, because the fetch of `match` is over."""
        request.move(RequestEvent.ARRIVE)
        if self.checkpointing is not None:
            self.checkpointing.on_fetch_over(request, match.num_tokens, is_fetched=is_fetched)
        if not is_fetched:
            return
        if not request.num_preemptions:
            request.num_cached = min(match.num_tokens, request.prompt_tokens)
            if match.is_handed_over:
                request.num_fetched = request.num_cached - request.num_computed
        request.num_computed = request.num_scheduled = match.num_tokens
        if not request.uses_draft_model:  # a head cannot compute what was fetched
            request.num_draft_computed = match.num_tokens
        self._publish(request)

    def finish(self, request: Request) -> None:
        """Release the slot and blocks of an ended request, or remove it from the queue.

        The request must not be in a step in flight, and its fetch must be over.
        """
        if request.slot is not None:
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    # ---- running

    def _pause_decodes(self, step: Schedule, decodes: list[Request]) -> None:
        """Pause decodes that would make a newcomer's first step longer.

        A paused decode keeps the block that was just allocated for it.
        """
        has_paused_decodes, self._has_paused_decodes = self._has_paused_decodes, False
        if has_paused_decodes or not step.admitted:
            return
        paused = paused_decodes(decodes, step.admitted[0])
        if paused and self.fair_share.is_step_longer(step.num_tokens - len(paused), len(paused)):
            self._has_paused_decodes = True
            step.decodes = [request for request in step.decodes if request not in paused]

    def _schedule_decodes(self, step: Schedule) -> list[Request]:
        """Schedule the running requests that have one token left to compute, oldest first, and
        return those that have more. There are never more running requests than the token budget.

        First, each running request that lacks a block for its next token gets one. If blocks run
        out, leases yield or the youngest requests are preempted.
        """
        able = self._able_to_run()
        if self.tables.can_grow(able):
            self.tables.grow_all(self.tables.growing(able), step)
        else:
            for request in list(able):
                if request.phase is RequestPhase.RUNNING:
                    self._ensure_block(request, step)
        running = running_column(able)
        counts = uncomputed_column(running)
        if counts.count(1) == len(counts):
            step.decodes, prefills = running, []
        else:
            step.decodes = [r for r, count in zip(running, counts, strict=True) if count == 1]
            prefills = [r for r, count in zip(running, counts, strict=True) if count > 1]
        step.budget -= len(step.decodes)
        return prefills

    def _able_to_run(self) -> list[Request]:
        """Return the requests of `running` whose next position does not wait for an image."""
        if not self._images.content.users:
            return self.running
        return [request for request in self.running if not self._images.is_held_back(request)]

    def _schedule_prefills(
        self, step: Schedule, prefills: Sequence[Request], *, may_admit: bool, reserved: int
    ) -> None:
        """Schedule prompt chunks of the running requests `prefills`.

        - may_admit: first admit newcomers of accounts that were served less. If there are any, no
          prompt chunks are added, because these would make the newcomers' step longer
        - reserved: the part of the budget that only these newcomers may use
        """
        for request in prefill_order(prefills):
            if may_admit:
                num_admitted = len(step.admitted)
                self._admit(step, before=request)
                if len(step.admitted) > num_admitted:
                    step.budget = 0
            step.budget, reserved = max(step.budget - reserved, 0), 0
            if step.budget == 0:
                return
            if self._fits(request, request.num_scheduled, step):
                self.fair_share.on_scheduled(request.account_usage)
                self._schedule_tokens(request, step)

    def _fits(self, request: Request, start: int, step: Schedule) -> bool:
        """Return whether the step has budget for a chunk of the request from `start` on."""
        return self._room(request, start, step) >= least_end(request.whole_runs, start) - start

    def _room(self, request: Request, start: int, step: Schedule) -> int:
        """Return the budget left for a chunk of the request from `start` on.

        A run that is computed as a whole may exceed the budget for the prompts of several accounts
        if the step has no other chunk. It then fits beside all decodes (`Limits.max_whole_run`).
        """
        if not request.whole_runs or step.chunks:
            return step.budget
        least = least_end(request.whole_runs, start) - start
        return max(step.budget, min(least, self.limits.token_budget - step.num_tokens))

    def _schedule_tokens(self, request: Request, step: Schedule) -> None:
        """Schedule the next tokens of a request: as many as the budget, the blocks and the images
        that are ready allow. There may be too few blocks for a run that is computed as a whole."""
        start = request.num_scheduled
        end = start + min(request.num_uncomputed, self._room(request, start, step))
        if request.images:
            end = min(end, self._images.num_computable(request))
        end = request.last_end(end)
        covered = self.tables.grow_if_free(request, end, step)
        count = request.last_end(min(end, covered)) - start
        if count <= 0:
            return
        if count < request.num_uncomputed:
            step.partial.add(request)
        if count == 1:
            step.decodes.append(request)
        else:
            step.chunks.append((request, count))
        step.budget = max(step.budget - count, 0)

    def _ensure_block(self, request: Request, step: Schedule) -> bool:
        """Allocate a block for the request's next token if it needs one, or the blocks for the run
        that it computes next as a whole.

        If no block is free, leases yield or the youngest requests are preempted. Return False if
        the request itself was preempted.
        """
        if not self.tables.needs_block(request):
            return True
        while not self.tables.try_grow(request, request.least_end, step):
            if self._kv_transfers.yield_lease(request):
                continue
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, step: Schedule) -> None:
        """Release the victim's slot and blocks, and put it back into the queue."""
        assert not victim.num_in_flight, "the tokens of a plan in flight would be lost"
        victim.move(RequestEvent.PREEMPT)
        victim.num_preemptions += 1
        self._release(victim)
        self.waiting.push(victim)
        step.preempted.append(victim)

    def _publish(self, request: Request) -> None:
        if published := self.prefixes.publish(request):
            self._kv_transfers.publish(request, published)
            if self.checkpointing is not None:
                self.checkpointing.on_published(request, published)

    def _release(self, request: Request) -> None:
        assert request.slot is not None
        self._kv_transfers.on_releasing(request)
        saving = self.checkpointing
        num_useful = None if saving is None else saving.on_releasing(request)
        is_bound = request not in self.unbound
        (self.running if is_bound else self.unbound).remove(request)
        self.slots.release(request, is_bound=is_bound)
        self.tables.release(request, num_useful)
        request.num_computed = request.num_scheduled = request.num_draft_computed = 0
        request.num_published = 0
        if request.num_generated == 0:
            request.prompt_logprobs = []  # will be computed again

    # ---- waiting

    def _admit(self, step: Schedule, before: Request | None = None) -> None:
        """Admit requests from the queue until slots, blocks or budget run out.

        With `before`, admit only requests that go before that running request.
        """
        while (request := self.waiting.first()) is not None:
            if before is not None and not goes_before(request, before):
                return
            if not self._has_slot:
                self._blocked_newcomer = request
                return
            found = self.prefixes.find(request)
            match = self._kv_transfers.match(request, len(found))
            if self.checkpointing is not None:
                self.checkpointing.read(request, len(found), step)
                if match is not None and not self.checkpointing.can_fetch(request):
                    match = None
            num_found = len(found) * self.limits.block_tokens
            if match is None and not self._fits(request, num_found, step):
                return  # only a request that starts a fetch needs no budget
            if not self._allocate_for(request, found):
                self._blocked_newcomer = request
                return
            self.fair_share.on_scheduled(request.account_usage)
            self.waiting.remove(request)
            self.slots.allocate(request)
            self._images.on_admitted(request)
            if match is not None:
                self._fetch(request, match, step)
            elif self._images.is_held_back(request):
                self._await_image(request, step)
            else:
                self._bind(request, step)

    @property
    def _has_slot(self) -> bool:
        return len(self.running) + len(self.unbound) < self._max_running

    def _preempt_for_newcomer(self, step: Schedule) -> None:
        """Preempt requests for the newcomer that the last step had no room for."""
        victims = self._fair_share_victims()
        request, self._blocked_newcomer = self._blocked_newcomer, None
        for victim in victims:
            assert request is not None
            if self._has_slot and self.tables.num_needed(request) <= self.pool.num_free:
                return
            self._preempt(victim, step)

    def _fair_share_victims(self) -> list[Request]:
        """Return the requests that may be preempted for the blocked newcomer, youngest first.

        Return none if even preempting all of them would free too few blocks.
        """
        request = self._blocked_newcomer
        if request is None or request is not self.waiting.first():
            return []
        victims = preemption_victims(request, self.running)
        could_be_free = self.pool.num_free + sum(len(other.held_blocks) for other in victims)
        return victims if self.tables.num_needed(request) <= could_be_free else []

    def _fetch(self, request: Request, match: Match, step: Schedule) -> None:
        request.move(RequestEvent.FETCH)
        self.unbound.append(request)
        first, checkpoint = request.num_computed // self.limits.block_tokens, None
        if self.checkpointing is not None:
            checkpoint = self.checkpointing.start_fetch(request, match.num_tokens, step)
        blocks = request.blocks[first : first + match.num_blocks]
        self._kv_transfers.start_fetch(request, match, blocks, checkpoint)

    def _await_image(self, request: Request, step: Schedule) -> None:
        """Let a request with a slot wait in `unbound` for the image at its first position."""
        request.move(RequestEvent.FETCH)
        request.move(RequestEvent.ARRIVE)
        self.unbound.append(request)
        if self.checkpointing is not None:
            self.checkpointing.keep_read(request, step)

    def _bind_fetched(self, step: Schedule, max_tokens: int) -> bool:
        """Bind the READY requests that have at most `max_tokens` tokens left to compute. Return
        whether one of them waits for a step with more room."""
        awaits_room = False
        for request in list(self.unbound):
            if step.budget == 0:
                break
            if request.phase is not RequestPhase.READY or request.num_uncomputed > max_tokens:
                continue
            if self._images.is_held_back(request):
                continue
            if not self._fits(request, request.num_scheduled, step):
                awaits_room = True
                continue
            self.unbound.remove(request)
            if self.checkpointing is not None:
                self.checkpointing.read_kept(request, step)
            self._bind(request, step)
        return awaits_room

    def _bind(self, request: Request, step: Schedule) -> None:
        """Make an admitted request RUNNING, and schedule its first tokens.

        The worker zeroes its blocks that have no content yet.
        """
        request.move(RequestEvent.ADMIT)
        insort(self.running, request, key=lambda other: other.rank)
        request.num_charged = max(request.num_charged, request.num_computed)
        step.admitted.append(request)
        step.new_blocks += self.tables.fresh_blocks(request)
        self._schedule_tokens(request, step)

    def _allocate_for(self, request: Request, found: list[int]) -> bool:
        """Allocate the blocks, and the checkpoint if it needs one, with which the request is
        admitted, and set its progress.

        The first blocks are `found`, which are in the prefix cache. Return False, without
        allocating anything, if too few are free even after leases have yielded.
        """
        saving, yield_lease = self.checkpointing, self._kv_transfers.yield_lease
        if saving is not None and not saving.can_reserve(request, yield_lease):
            return False
        if not self.tables.admit(request, found, yield_lease):
            return False
        if saving is not None:
            saving.reserve(request)
        request.num_computed = request.num_scheduled = len(found) * self.limits.block_tokens
        known = (
            self.pool.cache.num_draft_computed(found) if request.uses_draft_model else len(found)
        )
        request.num_draft_computed = known * self.limits.block_tokens
        request.num_published = known
        if not request.num_preemptions:
            # The answer of a continued request may be cached, too.
            request.num_cached = min(request.num_computed, request.prompt_tokens)
        return True
