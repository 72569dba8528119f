"""The engine: one pure object with four verbs, and some more for grammars and for K/V.

    add(client, Generate)   -> Accepted or Refused, at once; None: its grammar is a job to be done
    settle(Compiled)        -> what became of such a job: Accepted or Refused for all who waited
    abort(client, numbers)  -> the ends of those that were open
    abort_named(names)      -> the ends of those that are called so, and which names
    plan()                  -> the next StepPlan, or None if there is nothing to compute
    masks()                 -> what the plan's masked rows may say, while it is being computed
    commit(StepResult)      -> news per client
    tick(now)               -> what is over by time, ends: news per client
    freed                   -> what aborted requests owned and is free again, for the caller to take
    take_orders()           -> what the worker is to do with K/V, before the next plan (kv/)
    hear(KVReport)          -> news per client: what became of that

No socket, no clock (times are arguments), no torch. At most `steps_in_flight` plans are out at a
time (inflight.py): the next one is planned while the tokens of the one before are on their way.
What a step in flight may still write (a slot, blocks) is never given to somebody else before that
step has committed, so requests that end in flight are kept aside until then.

Laws, checked by `check()` and the property tests: every block is free or held, a block's holders
are the requests and leases that list it, findable content was written by a committed step or has
been fetched, slots are unique, and each accepted request gets exactly one end.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice

from engine_core.blocks.hash import ContentHashes
from engine_core.blocks.pool import BlockPool
from engine_core.blocks.prefix_cache import PrefixCache
from engine_core.grammar.cache import CompiledGrammar, CompileJob
from engine_core.grammar.masks import fill
from engine_core.invariants import check_invariants
from engine_core.kv.fetches import Fetch
from engine_core.kv.fetches import FetchState as FetchState
from engine_core.kv.peers import PeerCluster, Peers
from engine_core.kv.tiers import TierIndex
from engine_core.kv.transfers import KVTransfers, Order
from engine_core.open_requests import OpenRequests
from engine_core.policy.accounts import Accounts
from engine_core.policy.deadlines import Deadlines, has_begun, lateness_of
from engine_core.policy.door import Door
from engine_core.policy.throughput import Throughput
from engine_core.request import Request, RequestEvent, RequestPhase
from engine_core.schedule.commit import NOTHING, CommittedTokens, end_of, news_of, seen, take
from engine_core.schedule.inflight import InflightSteps
from engine_core.schedule.plan import build_plan, matchers_of, work_of
from engine_core.schedule.row_results import RowResult
from engine_core.schedule.scheduler import Scheduler
from engine_core.speculation.drafting import Speculation
from engine_core.stage_timer import EngineClock
from protocol.config.engine import EngineConfig
from protocol.errors import StepFailed
from protocol.kv import KVReport
from protocol.messages import (
    Accepted,
    FinishReason,
    Generate,
    Limits,
    Output,
    Outputs,
    Refused,
    RequestView,
)
from protocol.model_card import ModelCard
from protocol.stats import EngineStats, WorkerView
from protocol.steps import Masks, StepPlan, StepResult


def draw_seed() -> int:
    return secrets.randbits(63)


MAX_SEEN = 10_000
"""Rows of one view, whatever is asked for."""


class Engine:
    """One replica's decisions. `draw_seed` is called for requests that bring no seed of their
    own.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelCard,
        limits: Limits,
        *,
        draft_cost: float = 0.0,
        step_costs: Sequence[tuple[int, float]] = (),
        draw_seed: Callable[[], int] = draw_seed,
        cluster: PeerCluster | None = None,
        tiers: Sequence[str] = (),
    ) -> None:
        """draft_cost, step_costs: see WorkerReady."""
        self.limits = limits
        self._config = config
        self._model = model
        self._speculation = Speculation(config, draft_cost, step_costs)
        hashes = ContentHashes(model.digest, limits.block_tokens)
        pool = BlockPool(limits.num_blocks, PrefixCache())
        peers = Peers(config, cluster, hashes, limits.block_tokens)
        self._speed = Throughput()
        kept = TierIndex(tiers, hashes, limits.block_tokens, self._speed, config.kv_load_tokens)
        self._exchange = KVTransfers(config, pool, peers, kept)
        self._scheduler = Scheduler(
            limits, hashes, pool, self._exchange, self._speculation, step_costs
        )
        self._open = OpenRequests()
        self._flights = InflightSteps(config.steps_in_flight)
        self._ended_in_flight: list[Request] = []  # own slot and blocks until no step has them
        self._generations: Counter[int] = Counter()  # slot -> how often it was bound
        self._step = 0
        self.freed: dict[bytes, list[int]] = {}  # client -> its aborted requests
        self._aborted: set[Request] = set()  # those that are still to come there
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._accounts = Accounts()
        self._clock = EngineClock()
        self._deadlines = Deadlines()
        self._timeouts: Counter[str] = Counter()
        self._num_admitted_tokens = 0  # since the last commit
        self._door = Door(
            config,
            model,
            limits,
            exchange=self._exchange,
            open_requests=self._open,
            waiting=self._scheduler.waiting,
            speculation=self._speculation,
            speed=self._speed,
            accounts=self._accounts,
            shares=self._scheduler.shares,
            draw_seed=draw_seed,
            clock=self._clock,
            deadlines=self._deadlines,
        )

    # ---- add

    @property
    def is_draining(self) -> bool:
        """Whether what is new is refused."""
        return self._door.is_draining

    def drain(self) -> None:
        """Finish what is accepted, refuse what is new."""
        self._door.is_draining = True

    def add(self, client: bytes, message: Generate) -> Accepted | Refused | None:
        """Queue a request, or say why not. None: `settle` will say it, see `take_jobs`."""
        return self._door.add(client, message)

    def take_jobs(self) -> list[CompileJob]:
        """Grammars to compile. Each is answered by one `settle`, in any order."""
        return self._door.take_jobs()

    def settle(self, compiled: CompiledGrammar) -> list[tuple[bytes, Accepted | Refused]]:
        """A grammar is compiled, or cannot be: (client, what to tell it), for all who waited."""
        return self._door.settle(compiled)

    # ---- abort

    def abort(self, client: bytes, numbers: Iterable[int]) -> list[Output]:
        """End these of `client`'s requests; numbers that are not open (any more) are no error."""
        found = [self._open.find(client, number) for number in dict.fromkeys(numbers)]
        requests = [request for request in found if request is not None]
        self._aborted.update(requests)
        return [self._end(request, "abort") for request in requests]

    def abort_named(
        self, names: Iterable[str]
    ) -> tuple[dict[bytes, list[Output]], dict[str, bool]]:
        """End every request that is called so: what to tell the client of each, and whether any
        was, by name. Two names of one request are both known."""
        found = {name: self._open.named(name) for name in names}
        ends: dict[bytes, list[Output]] = {}
        for request in dict.fromkeys(chain.from_iterable(found.values())):
            ends.setdefault(request.client, []).append(self._end(request, "abort"))
        return ends, {name: bool(requests) for name, requests in found.items()}

    def drop(self, client: bytes) -> None:
        """`client` is gone: abort all it has, with nobody to tell."""
        for request in self._open.of(client):
            self._end(request, "abort")

    # ---- plan

    @property
    def num_in_flight(self) -> int:
        """Plans that are out; `commit` comes for each, in their order."""
        return len(self._flights)

    @property
    def is_idle(self) -> bool:
        return not self._open and not self._flights and self._exchange.is_idle

    def plan(self) -> StepPlan | None:
        """Decide the next step and take what it needs. None: there is nothing to compute, or what
        is out must commit first."""
        if self._flights.is_full or not self._scheduler.has_work:
            return None
        is_shared = self._scheduler.shares.are_several(self._clock.now)
        if self._flights and self._must_await(is_shared=is_shared):
            return None
        schedule = self._scheduler.schedule(is_shared=is_shared)
        self._counts["preemptions"] += len(schedule.preempted)
        work = work_of(schedule)
        if not work:
            return None
        for request in schedule.admitted:
            assert request.slot is not None
            self._generations[request.slot] += 1
            self._num_admitted_tokens += len(request.tokens)
            if not request.num_preemptions:
                self._counts["prompt_tokens"] += request.prompt_tokens
                self._counts["cached_tokens"] += request.num_cached
        for request, count in work:
            ahead = request.num_scheduled + count
            if ahead > request.num_charged:
                request.share.served += ahead - request.num_charged
                request.num_charged = ahead
            if request.kv_readers and count >= request.num_uncomputed:
                self._exchange.announce(request)
        self._step += 1
        plan = build_plan(self._step, schedule, self._scheduler.released_slots, self._generations)
        self._scheduler.released_slots.clear()
        self._flights.depart(plan, work)
        return plan

    def _must_await(self, *, is_shared: bool) -> bool:
        """Whether the next step depends on what is out: it may have to preempt, or to draft. Or
        there is time until it can begin, in which somebody may still come who goes first."""
        scheduler = self._scheduler
        prompt_tokens = self._flights.num_prompt_tokens
        return (
            not scheduler.can_continue()
            or self._flights.are_decisive
            or (prompt_tokens > 0 and (is_shared or self._speed.is_long(prompt_tokens)))
            or self._speculation.awaits(scheduler.running, len(scheduler.running))
        )

    def masks(self) -> Masks | None:
        """For the oldest plan that is out, once: what comes before its tokens is known only now.
        None where no grammar constrains any of its rows."""
        flight = self._flights.oldest
        if flight is None or not flight.needs_masks:
            return None
        flight.needs_masks = False
        matchers = matchers_of(flight.plan, flight.work)
        return Masks(step=flight.plan.step, bits=fill(matchers, self._model.vocab_size))

    # ---- commit

    def commit(self, result: StepResult, elapsed_s: float) -> dict[bytes, Outputs]:
        """Take in the result of the oldest plan that is out, `elapsed_s` after it was sent, or
        after the result before it, if that came later.

        Raises RuntimeError when the result is not of that plan.
        """
        flight, outcomes = self._flights.land(result)
        work, num_computed = flight.work, flight.num_tokens
        if not flight.prompts:
            self._speculation.learn(len(work), num_computed, flight.num_guesses, elapsed_s)
        self._counts["computed_tokens"] += num_computed
        self._speed.measure(num_computed, elapsed_s, has_prompts=flight.has_prompts)
        if len(self._scheduler.waiting):
            self._speed.admitted.measure(self._num_admitted_tokens, elapsed_s)
        self._num_admitted_tokens = 0
        self._let_go()
        news: dict[bytes, list[Output]] = {}
        for (request, count), outcome in zip(work, outcomes, strict=True):
            if request.phase is RequestPhase.RUNNING and (
                output := self._take(request, count, outcome)
            ):
                news.setdefault(request.client, []).append(output)
        return {
            client: Outputs(step=result.step, outputs=outputs) for client, outputs in news.items()
        }

    def _let_go(self) -> None:
        """Take back what belonged to requests that no step in flight has any more."""
        still = []
        for request in self._ended_in_flight:
            if request.num_in_flight:
                still.append(request)
            else:
                self._give_back(request)
        self._ended_in_flight = still

    def _give_back(self, request: Request) -> None:
        """Of one that has ended: nobody will write any more to what it owns."""
        self._scheduler.finish(request)
        if request in self._aborted:
            self._aborted.remove(request)
            self.freed.setdefault(request.client, []).append(request.number)

    def _take(self, request: Request, count: int, outcome: RowResult) -> Output | None:
        """What a committed step means for one request: its news, or None while its prompt is
        computed.
        """
        taken = take(request, count, outcome)
        self._counts["generated_tokens"] += len(taken.tokens)
        if request.account is not None:
            self._accounts.spend(request.account, len(taken.tokens))
        self._counts["draft_tokens"] += outcome.num_drafts
        self._counts["accepted_tokens"] += taken.num_accepted
        self._scheduler.advance(request, taken.num_valid)
        if taken.finish is not None:
            return self._end(request, taken.finish, taken)
        if taken.tokens:
            return news_of(request, taken)
        if request.samples or request.num_computed < len(request.tokens):
            return None
        if request.kv_readers:
            taken.kv_handle = self._exchange.hand_over(request)
        return self._end(request, "length", taken)

    def _end(
        self, request: Request, finish: FinishReason, taken: CommittedTokens = NOTHING
    ) -> Output:
        """The one way a request ends; its last news, with what the last step brought."""
        if not taken.kv_handle:
            self._exchange.retract(request)
        last = end_of(request, finish, taken, self._model)
        self._open.remove(request)
        self._deadlines.forget(request)
        self._door.leave(request)
        self._finished[finish] += 1
        is_fetching = request.phase is RequestPhase.FETCHING
        request.move(RequestEvent.FINISH)
        if is_fetching:
            self._exchange.give_up(request)  # `hear` takes back what it owns
        elif request.num_in_flight:
            self._ended_in_flight.append(request)
        else:
            self._give_back(request)
        return last

    # ---- K/V that changes hands

    @property
    def next_deadline(self) -> float:
        """Of all requests: `tick` ends none before."""
        return self._deadlines.next_at

    def tick(self, now: float) -> dict[bytes, Outputs]:
        """It is `now`, in seconds of a steady clock: the ends of requests that are too late."""
        self._exchange.tick(now)
        self._accounts.now = self._clock.now = now
        news: dict[bytes, list[Output]] = {}
        for request in self._deadlines.over(now):
            self._timeouts["running" if has_begun(request) else "queued"] += 1
            error = lateness_of(request, now, self._door.retry_after_s)
            news.setdefault(request.client, []).append(
                self._end(request, "error", CommittedTokens(error=error))
            )
        return {client: Outputs(step=0, outputs=outputs) for client, outputs in news.items()}

    def drain_kv_commands(self) -> list[Order]:
        """What to tell the worker, in this order, before any later plan, and before clients hear
        what follows from it."""
        orders, self._exchange.orders = self._exchange.orders, []
        return orders

    def keep_kv(self, handles: Iterable[str]) -> None:
        """Count the time of these anew. Not while draining, which is to end."""
        if not self.is_draining:
            self._exchange.keep(handles)

    def release_kv(self, handles: Iterable[str]) -> None:
        """Nobody will come for these."""
        self._exchange.release(handles)

    def hear(self, report: KVReport) -> dict[bytes, Outputs]:
        """Jobs and leases that are over, as the worker says. Raises RuntimeError on a job that is
        not out."""
        news: dict[bytes, list[Output]] = {}
        for fetch in self._exchange.hear(report):
            if (output := self._settle_fetch(fetch)) is not None:
                news.setdefault(fetch.request.client, []).append(output)
        return {client: Outputs(step=0, outputs=outputs) for client, outputs in news.items()}

    def owed_s(self, now: float) -> float:
        """For how long the worker has owed a report on a fetch."""
        return self._exchange.fetches.longest_s(now)

    def _settle_fetch(self, fetch: Fetch) -> Output | None:
        request = fetch.request
        if fetch.state is FetchState.DROPPED:
            self._give_back(request)
            return None
        if fetch.state is FetchState.ARRIVED:
            self._scheduler.arrive(request, fetch.match)
            return None
        self._scheduler.arrive(request, None)
        if not fetch.match.is_for_it or self._config.kv_on_failure == "recompute":
            return None
        error = StepFailed(f"the prompt's K/V could not be fetched ({fetch.error})")
        return self._end(request, "error", CommittedTokens(error=error))

    # ---- what others may know

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    @property
    def names(self) -> list[str]:
        """One of each request that is open: `abort_named` knows them."""
        return [request.name for request in self._open]

    def view(self, most: int) -> list[tuple[bytes, RequestView]]:
        """(client, request) of the `most` that have been open for longest, up to MAX_SEEN."""
        longest = islice(self._open, min(max(most, 0), MAX_SEEN))
        return [(request.client, seen(request)) for request in longest]

    def at_work(self) -> WorkerView:
        """What the worker computes, as far as its plans say; the times are for others to fill in,
        but for what is expected."""
        flight = self._flights.oldest
        if flight is None:
            return WorkerView()
        rate = self._speed.tokens_per_s
        return WorkerView(
            step=flight.plan.step,
            expected_s=flight.num_tokens / rate if rate else 0.0,
            prompt_tokens=sum(request.prompt_tokens for request in flight.prompts),
            computed_tokens=sum(request.num_computed for request in flight.prompts),
        )

    def stats(self, *, clients: int = 0, wire_errors: int = 0) -> EngineStats:
        scheduler, leases = self._scheduler, self._exchange.leases
        fetches, tiers = self._exchange.fetches, self._exchange.tiers
        return EngineStats(
            draining=self.is_draining,
            running=sum(request.slot is not None for request in self._open),
            waiting=self._door.num_waiting,
            waiting_tokens=scheduler.waiting.tokens,
            free_blocks=scheduler.pool.num_free,
            total_blocks=scheduler.pool.total,
            clients=clients,
            fetching=len(fetches),
            leases=len(leases),
            leased_blocks=leases.num_blocks,
            num_steps=self._step,
            num_accepted=self._door.num_accepted,
            num_refused=self._door.num_refused,
            num_finished=dict(self._finished),
            num_prompt_tokens=self._counts["prompt_tokens"],
            num_cached_tokens=self._counts["cached_tokens"],
            num_computed_tokens=self._counts["computed_tokens"],
            num_fetched_tokens=fetches.num_tokens,
            num_fetched_bytes=fetches.num_bytes,
            num_fetches_failed=dict(fetches.num_failed),
            num_timeouts=dict(self._timeouts),
            num_leases_ended=dict(leases.num_ended),
            tier_blocks=tiers.told(lambda tier: tier.num_blocks),
            tier_bytes=tiers.told(lambda tier: tier.num_bytes),
            num_tier_stored=tiers.told(lambda tier: tier.num_stored),
            num_tier_dropped=tiers.told(lambda tier: tier.num_dropped),
            num_tier_loaded=tiers.told(lambda tier: tier.num_loaded),
            num_tier_failed=tiers.told(lambda tier: tier.num_failed),
            num_generated_tokens=self._counts["generated_tokens"],
            num_preemptions=self._counts["preemptions"],
            num_draft_tokens=self._counts["draft_tokens"],
            num_accepted_tokens=self._counts["accepted_tokens"],
            num_wire_errors=wire_errors,
            busy_s=self._speed.busy_s,
        )

    def check(self) -> None:
        """Every law of slots, blocks and the prefix cache, by brute force; for tests."""
        check_invariants(self._scheduler, self._exchange.leases, self._open, self._ended_in_flight)
