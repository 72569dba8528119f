"""The engine: a pure object that decides what the worker computes.

Its verbs:

    add(client, Generate)            -> Accepted or Refused; None while its grammar is compiled
    on_grammar_compiled(compiled)    -> Accepted or Refused for each request that waited for it
    abort(client, numbers)           -> the final Output of each request that was open
    abort_by_label(names)            -> the final Outputs, and which names were found
    plan()                           -> the next StepPlan, or None if there is nothing to compute
    masks()                          -> the token masks of the oldest plan, while it is computed
    commit(StepResult)               -> Outputs per client
    tick(now)                        -> Outputs of requests that missed a deadline, per client
    drain_kv_commands()              -> K/V commands to send to the worker before the next plan
    on_kv_report(KVReport)           -> Outputs per client
    freed                            -> aborted requests whose slot and blocks are free again

It has no socket, no clock (times are arguments) and no torch. At most `steps_in_flight` plans are
in flight (inflight.py): a step can be planned before the tokens of the previous one are known. A
slot or block that a step in flight may still write to is not reused until that step has committed.
A request that ends earlier is kept aside until then.

Invariants, checked by `check()` and the property tests: every block is either free or held; a
block's holders are the requests and leases that list it; findable content was written by a
committed step or fetched; slots are unique; each accepted request ends exactly once.
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
from engine_core.kv.transfers import KVCommand, KVTransfers
from engine_core.open_requests import OpenRequests
from engine_core.policy.accounts import Accounts
from engine_core.policy.admission import Admission
from engine_core.policy.deadlines import Deadlines, has_started, timeout_error
from engine_core.policy.throughput import Throughput
from engine_core.request import Request, RequestEvent, RequestPhase
from engine_core.schedule.commit import (
    NOTHING_COMMITTED,
    CommittedTokens,
    commit_row,
    final_output,
    progress_output,
    view_row,
)
from engine_core.schedule.inflight import InflightSteps
from engine_core.schedule.plan import build_plan, mask_matchers, plan_rows
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


MAX_VIEW_ROWS = 10_000
"""Most rows in one status reply."""


class Engine:
    """The decisions of one replica. `draw_seed` returns the seed for a request that brings none."""

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
        """Create the engine. `draft_cost` and `step_costs` are described in WorkerReady."""
        self.limits = limits
        self._config = config
        self._model = model
        self._speculation = Speculation(config, draft_cost, step_costs)
        hashes = ContentHashes(model.digest, limits.block_tokens)
        pool = BlockPool(limits.num_blocks, PrefixCache())
        peers = Peers(config, cluster, hashes, limits.block_tokens)
        self.throughput = Throughput()
        tier_index = TierIndex(
            tiers, hashes, limits.block_tokens, self.throughput, config.kv_load_tokens
        )
        self.kv_transfers = KVTransfers(config, pool, peers, tier_index)
        self.scheduler = Scheduler(
            limits, hashes, pool, self.kv_transfers, self._speculation, step_costs
        )
        self.open_requests = OpenRequests()
        self._inflight = InflightSteps(config.steps_in_flight)
        #: Ended, but in a step in flight: they keep slot and blocks until it commits.
        self._ended_in_flight: list[Request] = []
        #: Number of the last plan.
        self._step = 0
        #: Client -> its aborted requests whose slot and blocks are free again.
        self.freed: dict[bytes, list[int]] = {}
        #: Aborted by their client, but not in `freed` yet.
        self._aborted: set[Request] = set()
        #: Totals for EngineStats, by name.
        self._counts: Counter[str] = Counter()
        #: Finish reason -> number of requests.
        self._finished: Counter[str] = Counter()
        #: "queued" or "running" -> number of missed deadlines.
        self._timeouts: Counter[str] = Counter()
        #: Known tokens of the requests admitted since the last commit.
        self._num_admitted_tokens = 0
        self._accounts = Accounts()
        self._clock = EngineClock()
        self._deadlines = Deadlines()
        self.admission = self._new_admission(draw_seed)

    def _new_admission(self, draw_seed: Callable[[], int]) -> Admission:
        return Admission(
            self._config,
            self._model,
            self.limits,
            kv_transfers=self.kv_transfers,
            open_requests=self.open_requests,
            waiting=self.scheduler.waiting,
            speculation=self._speculation,
            throughput=self.throughput,
            accounts=self._accounts,
            fair_share=self.scheduler.fair_share,
            draw_seed=draw_seed,
            clock=self._clock,
            deadlines=self._deadlines,
        )

    # ---- add

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self.admission.is_draining

    def drain(self) -> None:
        """Finish the accepted requests and refuse new ones."""
        self.admission.is_draining = True

    def add(self, client: bytes, message: Generate) -> Accepted | Refused | None:
        """Queue a request or refuse it.

        Return None if its grammar has to be compiled first (`drain_compile_jobs`);
        `on_grammar_compiled` returns the reply then.
        """
        return self.admission.add(client, message)

    def drain_compile_jobs(self) -> list[CompileJob]:
        """Return the grammars to compile.

        Answer each with one `on_grammar_compiled`, in any order.
        """
        return self.admission.drain_compile_jobs()

    def on_grammar_compiled(
        self, compiled: CompiledGrammar
    ) -> list[tuple[bytes, Accepted | Refused]]:
        """Apply a compilation's outcome, and return (client, reply) for each waiting request."""
        return self.admission.on_grammar_compiled(compiled)

    # ---- abort

    def abort(self, client: bytes, numbers: Iterable[int]) -> list[Output]:
        """End these requests of `client`. Numbers that are not open are ignored."""
        found = [self.open_requests.find(client, number) for number in dict.fromkeys(numbers)]
        requests = [request for request in found if request is not None]
        self._aborted.update(requests)
        return [self._finish_request(request, "abort") for request in requests]

    def abort_by_label(
        self, names: Iterable[str]
    ) -> tuple[dict[bytes, list[Output]], dict[str, bool]]:
        """End every request with one of these labels or names.

        Return the final Outputs per client, and for each name whether it matched a request. If two
        names match one request, both count as matched.
        """
        found = {name: self.open_requests.find_by_name(name) for name in names}
        ends: dict[bytes, list[Output]] = {}
        for request in dict.fromkeys(chain.from_iterable(found.values())):
            ends.setdefault(request.client, []).append(self._finish_request(request, "abort"))
        return ends, {name: bool(requests) for name, requests in found.items()}

    def on_client_lost(self, client: bytes) -> None:
        """Abort all requests of a client that is gone."""
        for request in self.open_requests.from_client(client):
            self._finish_request(request, "abort")

    # ---- plan

    @property
    def num_in_flight(self) -> int:
        """The number of plans in flight. `commit` is called for each, in order."""
        return len(self._inflight)

    @property
    def is_idle(self) -> bool:
        return not self.open_requests and not self._inflight and self.kv_transfers.is_idle

    def plan(self) -> StepPlan | None:
        """Decide the next step and allocate what it needs.

        Return None if there is nothing to compute, or if a plan in flight must commit first.
        """
        if self._inflight.is_full or not self.scheduler.has_work:
            return None
        is_shared = self.scheduler.fair_share.is_shared(self._clock.now)
        if self._inflight and self._must_wait(is_shared=is_shared):
            return None
        schedule = self.scheduler.schedule(is_shared=is_shared)
        self._counts["preemptions"] += len(schedule.preempted)
        rows = plan_rows(schedule)
        if not rows:
            return None
        for request in schedule.admitted:
            self._num_admitted_tokens += len(request.tokens)
            if not request.num_preemptions:
                self._counts["prompt_tokens"] += request.prompt_tokens
                self._counts["cached_tokens"] += request.num_cached
        for request, count in rows:
            ahead = request.num_scheduled + count
            if ahead > request.num_charged:
                request.account_usage.served += ahead - request.num_charged
                request.num_charged = ahead
            if request.kv_readers and count >= request.num_uncomputed:
                self.kv_transfers.announce(request)
        self._step += 1
        plan = build_plan(self._step, schedule, self.scheduler.slots.drain_releases())
        self._inflight.on_sent(plan, rows)
        return plan

    def _must_wait(self, *, is_shared: bool) -> bool:
        """Whether the next step must wait for the plans in flight.

        It must if the step may preempt, or depends on drafts. It also waits after a long prefill,
        so that a request that arrives meanwhile can go first.
        """
        scheduler = self.scheduler
        prompt_tokens = self._inflight.num_prompt_tokens
        return (
            not scheduler.can_continue()
            or self._inflight.are_decisive
            or (prompt_tokens > 0 and (is_shared or self.throughput.is_long_step(prompt_tokens)))
            or self._speculation.should_wait(scheduler.running, len(scheduler.running))
        )

    def masks(self) -> Masks | None:
        """Return the masks of the oldest plan in flight, once.

        A mask depends on all tokens before it, so it is known only after the previous plan has
        committed. Return None if no grammar constrains the plan's rows.
        """
        step = self._inflight.oldest
        if step is None or not step.needs_masks:
            return None
        step.needs_masks = False
        matchers = mask_matchers(step.plan, step.rows)
        return Masks(step=step.plan.step, bits=fill(matchers, self._model.vocab_size))

    # ---- commit

    def commit(self, result: StepResult, elapsed_s: float) -> dict[bytes, Outputs]:
        """Apply the result of the oldest plan in flight.

        `elapsed_s`: since the plan was sent, or since the previous result if that came later.
        Raises RuntimeError if the result belongs to another plan.
        """
        step, row_results = self._inflight.on_completed(result)
        rows, num_computed = step.rows, step.num_tokens
        if not step.prompts:
            self._speculation.observe(len(rows), num_computed, step.num_requested_drafts, elapsed_s)
        self._counts["computed_tokens"] += num_computed
        self.throughput.observe(num_computed, elapsed_s, has_prompts=step.has_prompts)
        if len(self.scheduler.waiting):
            self.throughput.admitted.observe(self._num_admitted_tokens, elapsed_s)
        self._num_admitted_tokens = 0
        self._release_ended()
        outputs: dict[bytes, list[Output]] = {}
        for (request, count), row_result in zip(rows, row_results, strict=True):
            if request.phase is RequestPhase.RUNNING and (
                output := self._commit_row(request, count, row_result)
            ):
                outputs.setdefault(request.client, []).append(output)
        return {client: Outputs(step=result.step, outputs=own) for client, own in outputs.items()}

    def _release_ended(self) -> None:
        """Release the slots and blocks of ended requests that are in no step in flight."""
        still = []
        for request in self._ended_in_flight:
            if request.num_in_flight:
                still.append(request)
            else:
                self._release(request)
        self._ended_in_flight = still

    def _release(self, request: Request) -> None:
        """Release what an ended request owns. Nothing writes to it any more."""
        self.scheduler.finish(request)
        if request in self._aborted:
            self._aborted.remove(request)
            self.freed.setdefault(request.client, []).append(request.number)

    def _commit_row(self, request: Request, count: int, row_result: RowResult) -> Output | None:
        """Apply one row of a committed step. Return None while the prompt is being computed."""
        committed = commit_row(request, count, row_result)
        self._counts["generated_tokens"] += len(committed.tokens)
        if request.account is not None:
            self._accounts.charge_tokens(request.account, len(committed.tokens))
        self._counts["draft_tokens"] += row_result.num_drafts
        self._counts["accepted_tokens"] += committed.num_accepted
        self.scheduler.advance(request, committed.num_valid)
        if committed.finish is not None:
            return self._finish_request(request, committed.finish, committed)
        if committed.tokens:
            return progress_output(request, committed)
        if request.samples or request.num_computed < len(request.tokens):
            return None
        if request.kv_readers:
            committed.kv_handle = self.kv_transfers.hand_over(request)
        return self._finish_request(request, "length", committed)

    def _finish_request(
        self, request: Request, finish: FinishReason, committed: CommittedTokens = NOTHING_COMMITTED
    ) -> Output:
        """End a request, and return its final Output with the tokens of the last step.

        This is the only way a request ends.
        """
        if not committed.kv_handle:
            self.kv_transfers.retract(request)
        last = final_output(request, finish, committed, self._model)
        self.open_requests.remove(request)
        self._deadlines.remove(request)
        self.admission.on_request_ending(request)
        self._finished[finish] += 1
        is_fetching = request.phase is RequestPhase.FETCHING
        request.move(RequestEvent.FINISH)
        if is_fetching:
            self.kv_transfers.cancel_fetch(request)  # `on_kv_report` releases its slot and blocks
        elif request.num_in_flight:
            self._ended_in_flight.append(request)
        else:
            self._release(request)
        return last

    # ---- deadlines and K/V transfer

    @property
    def next_deadline(self) -> float:
        """The earliest deadline of all requests. `tick` ends none before it."""
        return self._deadlines.next_at

    def tick(self, now: float) -> dict[bytes, Outputs]:
        """Set the clock to `now` (of a steady clock), and end the requests past their deadline."""
        self.kv_transfers.tick(now)
        self._accounts.now = self._clock.now = now
        outputs: dict[bytes, list[Output]] = {}
        for request in self._deadlines.pop_late(now):
            self._timeouts["running" if has_started(request) else "queued"] += 1
            error = timeout_error(request, now, self.admission.retry_after_s)
            outputs.setdefault(request.client, []).append(
                self._finish_request(request, "error", CommittedTokens(error=error))
            )
        return {client: Outputs(step=0, outputs=own) for client, own in outputs.items()}

    def drain_kv_commands(self) -> list[KVCommand]:
        """Return the K/V commands for the worker, in order.

        Send them before any later plan, and before clients receive what depends on them.
        """
        commands, self.kv_transfers.commands = self.kv_transfers.commands, []
        return commands

    def keep_kv(self, handles: Iterable[str]) -> None:
        """Renew the leases of these handles, unless draining."""
        if not self.is_draining:
            self.kv_transfers.renew(handles)

    def release_kv(self, handles: Iterable[str]) -> None:
        """End the leases of these handles: no reader will come."""
        self.kv_transfers.release(handles)

    def on_kv_report(self, report: KVReport) -> dict[bytes, Outputs]:
        """Apply the worker's report on fetches, leases and tiers.

        Raises RuntimeError for a job that is not open.
        """
        outputs: dict[bytes, list[Output]] = {}
        for fetch in self.kv_transfers.on_kv_report(report):
            if (output := self._on_fetch_over(fetch)) is not None:
                outputs.setdefault(fetch.request.client, []).append(output)
        return {client: Outputs(step=0, outputs=own) for client, own in outputs.items()}

    def oldest_fetch_s(self, now: float) -> float:
        """Return the seconds since the oldest unreported fetch was requested."""
        return self.kv_transfers.fetches.oldest_s(now)

    def _on_fetch_over(self, fetch: Fetch) -> Output | None:
        request = fetch.request
        if fetch.state is FetchState.DROPPED:
            self._release(request)
            return None
        if fetch.state is FetchState.ARRIVED:
            self.scheduler.on_fetch_over(request, fetch.match)
            return None
        self.scheduler.on_fetch_over(request, None)
        if not fetch.match.is_handed_over or self._config.kv_on_failure == "recompute":
            return None
        error = StepFailed(f"the prompt's K/V could not be fetched ({fetch.error})")
        return self._finish_request(request, "error", CommittedTokens(error=error))

    # ---- status

    @property
    def num_open(self) -> int:
        """The number of requests that have not ended."""
        return len(self.open_requests)

    @property
    def names(self) -> list[str]:
        """One name for each open request, as `abort_by_label` accepts it."""
        return [request.name for request in self.open_requests]

    def status_rows(self, max_rows: int) -> list[tuple[bytes, RequestView]]:
        """Return (client, row) of the `max_rows` oldest requests, at most MAX_VIEW_ROWS."""
        oldest = islice(self.open_requests, min(max(max_rows, 0), MAX_VIEW_ROWS))
        return [(request.client, view_row(request)) for request in oldest]

    def worker_view(self) -> WorkerView:
        """Return what the worker is computing, according to the oldest plan in flight.

        The caller fills in the measured times; `expected_s` is set here.
        """
        step = self._inflight.oldest
        if step is None:
            return WorkerView()
        rate = self.throughput.tokens_per_s
        return WorkerView(
            step=step.plan.step,
            expected_s=step.num_tokens / rate if rate else 0.0,
            prompt_tokens=sum(request.prompt_tokens for request in step.prompts),
            computed_tokens=sum(request.num_computed for request in step.prompts),
        )

    def stats(self, *, clients: int = 0, wire_errors: int = 0) -> EngineStats:
        scheduler, leases = self.scheduler, self.kv_transfers.leases
        fetches, tiers = self.kv_transfers.fetches, self.kv_transfers.tiers
        return EngineStats(
            draining=self.is_draining,
            running=sum(request.slot is not None for request in self.open_requests),
            waiting=self.admission.num_waiting,
            waiting_tokens=scheduler.waiting.tokens,
            free_blocks=scheduler.pool.num_free,
            total_blocks=scheduler.pool.total,
            clients=clients,
            fetching=len(fetches),
            leases=len(leases),
            leased_blocks=leases.num_blocks,
            num_steps=self._step,
            num_accepted=self.admission.num_accepted,
            num_refused=self.admission.num_refused,
            num_finished=dict(self._finished),
            num_prompt_tokens=self._counts["prompt_tokens"],
            num_cached_tokens=self._counts["cached_tokens"],
            num_computed_tokens=self._counts["computed_tokens"],
            num_fetched_tokens=fetches.num_tokens,
            num_fetched_bytes=fetches.num_bytes,
            num_fetches_failed=dict(fetches.num_failed),
            num_timeouts=dict(self._timeouts),
            num_leases_ended=dict(leases.num_ended),
            tier_blocks=tiers.by_tier(lambda tier: tier.num_blocks),
            tier_bytes=tiers.by_tier(lambda tier: tier.num_bytes),
            num_tier_stored=tiers.by_tier(lambda tier: tier.num_stored),
            num_tier_dropped=tiers.by_tier(lambda tier: tier.num_dropped),
            num_tier_loaded=tiers.by_tier(lambda tier: tier.num_loaded),
            num_tier_failed=tiers.by_tier(lambda tier: tier.num_failed),
            num_generated_tokens=self._counts["generated_tokens"],
            num_preemptions=self._counts["preemptions"],
            num_draft_tokens=self._counts["draft_tokens"],
            num_accepted_tokens=self._counts["accepted_tokens"],
            num_wire_errors=wire_errors,
            busy_s=self.throughput.busy_s,
        )

    def check(self) -> None:
        """Check every invariant of slots, blocks and the prefix cache by brute force; for tests."""
        check_invariants(
            self.scheduler, self.kv_transfers.leases, self.open_requests, self._ended_in_flight
        )
