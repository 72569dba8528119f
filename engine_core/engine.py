"""The engine: a pure object that decides what the worker computes.

Its main methods and their results:

    add(client, Generate)            -> Accepted or Refused; None while its grammar is compiled
    add_encode(client, Encode)       -> Accepted or Refused
    on_grammar_compiled(compiled)    -> Accepted or Refused for each request that waited for it
    abort(client, numbers)           -> the final Output of each request that was open
    abort_by_label(names)            -> the final Outputs, and which names were found
    plan()                           -> the next StepPlan or EncodePlan, or None if no step can be
                                        planned now
    masks()                          -> the token masks of the oldest plan, while it is computed
    commit(StepResult)               -> Outputs per client
    commit_encoded(EncodeResult)     -> Outputs per client
    tick(now)                        -> Outputs of requests that missed a deadline, per client
    drain_kv_commands()              -> K/V commands to send to the worker before the next plan
    drain_kv_events()                -> changes of the prefix cache, for subscribers
    on_kv_report(KVReport)           -> Outputs per client
    load_adapter, unload_adapter     -> Refused, or None: on_adapter_report returns the reply
    drain_adapter_commands()         -> commands about LoRA adapters, to send before the next plan
    on_adapter_report(AdapterReport) -> (client, AdapterChanged or Refused)

The engine has no socket and no clock; times are arguments. At most `steps_in_flight` plans are in
flight (schedule/), so a step can be planned before the tokens of the previous one are known. A
slot or block that a step in flight may still write to is not reused until that step has committed.
A request that ends earlier keeps its slot and blocks until then.

These invariants are checked by `check()` and by the property tests:

- every block is either free or held;
- the holders of a block are the requests and leases that list it;
- a block in the prefix cache was written by a committed step, or fetched;
- no two requests own the same slot;
- each accepted request ends exactly once.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice

from engine_core.adapters import AdapterCommand, AdapterRegistry, AdapterReply
from engine_core.blocks.cache_events import CacheEvents
from engine_core.blocks.hash import ContentHashes
from engine_core.blocks.pool import BlockPool
from engine_core.blocks.prefix_cache import PrefixCache
from engine_core.encoding import EncodeScheduler
from engine_core.grammar.cache import CompiledGrammar, CompileJob
from engine_core.grammar.masks import compute_masks
from engine_core.history.history import EngineHistory
from engine_core.invariants import check_encoding, check_invariants
from engine_core.kv.fetches import Fetch
from engine_core.kv.fetches import FetchState as FetchState
from engine_core.kv.peers import PeerCluster, Peers
from engine_core.kv.tiers import TierIndex
from engine_core.kv.transfers import KVCommand, KVTransfers
from engine_core.open_requests import OpenRequests
from engine_core.policy.accounts import Accounts
from engine_core.policy.admission import Admission
from engine_core.policy.deadlines import Deadlines, has_started, timeout_error
from engine_core.policy.fair_share import charge_rows
from engine_core.policy.throughput import Throughput
from engine_core.request import Request, RequestEvent, RequestPhase
from engine_core.schedule.columns import quiet_tokens
from engine_core.schedule.commit import (
    NO_LOGPROBS,
    NOTHING_COMMITTED,
    CommittedTokens,
    commit_row,
    final_output,
    progress_output,
    status_row,
)
from engine_core.schedule.inflight import InflightStep, InflightSteps
from engine_core.schedule.plan import RowColumns, build_plan, mask_matchers
from engine_core.schedule.row_results import RowResult, StepRowResults
from engine_core.schedule.scheduler import Scheduler
from engine_core.speculation.drafting import Speculation
from engine_core.stage_timer import EngineClock
from protocol.adapters import AdapterInfo
from protocol.config.engine import EngineConfig
from protocol.errors import Draining, ServingError, StepFailed
from protocol.kv import KVReport
from protocol.kv_events import KVEvent
from protocol.messages import (
    Accepted,
    Encode,
    FinishReason,
    Generate,
    Limits,
    LoadAdapter,
    Output,
    Outputs,
    Refused,
    RequestStatus,
    UnloadAdapter,
)
from protocol.model_card import ModelCard
from protocol.stats import BlockCounts, EngineLoad, EngineStats, WorkerStatus
from protocol.steps import AdapterReport, EncodePlan, EncodeResult, Masks, StepPlan, StepResult
from protocol.timeline import EngineTimeline


def draw_seed() -> int:
    return secrets.randbits(63)


MAX_STATUS_ROWS = 10_000
"""Maximum number of request rows in one EngineStatus."""


class Engine:
    """All decisions of one engine process. `draw_seed` returns a random seed for a request whose
    client sent none."""

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
        adapters: Sequence[AdapterInfo] = (),
    ) -> None:
        """Create the engine of one worker.

        - draft_cost, step_costs: as in WorkerReady
        - cluster: for an engine that is part of a cluster
        - tiers: names of the worker's tiers
        - adapters: the LoRA adapters that the worker has loaded

        Raises ValueError if limits.kv_window or limits.kv_groups is set in an engine that must keep
        all blocks.
        """
        uses_draft_model = config.speculation == "model"
        window = limits.kv_window if limits.kv_groups is None else limits.kv_groups.window
        if window is not None and (cluster or tiers or uses_draft_model):
            raise ValueError(
                f"kv_window is {window}, but K/V transfer, tiers and draft models need the blocks "
                "that a window has passed"
            )
        self.limits = limits
        self._config = config
        self._model = model
        self._speculation = Speculation(config, draft_cost, step_costs)
        hashes = ContentHashes(model.digest, limits.block_tokens)
        names, size = config.kv_events_namespace, limits.block_tokens
        self._cache_events = CacheEvents(names, size) if config.kv_events else None
        pool = BlockPool(limits.num_blocks, PrefixCache(self._cache_events))
        peers = Peers(config, cluster, hashes, limits.block_tokens)
        self.throughput = Throughput()
        tier_index = TierIndex(
            tiers, hashes, limits.block_tokens, self.throughput, config.kv_load_tokens
        )
        self.kv_transfers = KVTransfers(config, pool, peers, tier_index)
        self.scheduler = Scheduler(
            limits, hashes, pool, self.kv_transfers, self._speculation, step_costs
        )
        self.encoding = EncodeScheduler(self.scheduler.fair_share, limits.token_budget)
        self.open_requests = OpenRequests()
        self._inflight = InflightSteps(config.steps_in_flight)
        #: Ended requests that are in a step in flight. They keep slot and blocks until it commits.
        self._ended_in_flight: list[Request] = []
        #: Number of the last plan.
        self._step = 0
        #: Client -> numbers of its aborted requests whose slot and blocks have become free. The
        #: loop reports these to the client, and clears the dict.
        self.freed: dict[bytes, list[int]] = {}
        #: Requests aborted by their client that still own their slot and blocks.
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
        self.adapters = AdapterRegistry(
            limits.max_adapters,
            adapters,
            reserved=(model.name,),
            can_load=bool(config.worker.lora_dir),
        )
        #: The last steps and requests, for reports. No decision depends on it.
        self.history = EngineHistory(self._clock, limits.max_slots)
        self.admission = self._new_admission(draw_seed)

    def _new_admission(self, draw_seed: Callable[[], int]) -> Admission:
        return Admission(
            self._config,
            self._model,
            self.limits,
            kv_transfers=self.kv_transfers,
            open_requests=self.open_requests,
            waiting=self.scheduler.waiting,
            encoding=self.encoding,
            speculation=self._speculation,
            throughput=self.throughput,
            accounts=self._accounts,
            fair_share=self.scheduler.fair_share,
            draw_seed=draw_seed,
            clock=self._clock,
            deadlines=self._deadlines,
            adapters=self.adapters,
        )

    # ---- add

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self.admission.is_draining

    def drain(self) -> None:
        """Refuse new requests from now on. Accepted requests are finished."""
        self.admission.is_draining = True

    def add(self, client: bytes, message: Generate) -> Accepted | Refused | None:
        """Queue a request or refuse it.

        Return None if its grammar must be compiled first. `on_grammar_compiled` then returns the
        reply.
        """
        return self.admission.add(client, message)

    def add_encode(self, client: bytes, message: Encode) -> Accepted | Refused:
        """Queue a request that encodes, or refuse it."""
        return self.admission.add_encode(client, message)

    def drain_compile_jobs(self) -> list[CompileJob]:
        """Return the compile jobs added since the last call. The caller must pass the outcome of
        each to `on_grammar_compiled`, in any order."""
        return self.admission.drain_compile_jobs()

    def on_grammar_compiled(
        self, compiled: CompiledGrammar
    ) -> list[tuple[bytes, Accepted | Refused]]:
        """Apply a compilation's outcome, and return (client, reply) for each waiting request."""
        return self.admission.on_grammar_compiled(compiled)

    # ---- abort

    def abort(self, client: bytes, numbers: Iterable[int]) -> list[Output]:
        """End these requests of `client`, and return their final Outputs. Numbers of requests that
        are not open are ignored."""
        found = [self.open_requests.find(client, number) for number in dict.fromkeys(numbers)]
        requests = [request for request in found if request is not None]
        self._aborted.update(requests)
        return [self._finish_request(request, "abort") for request in requests]

    def abort_by_label(
        self, names: Iterable[str]
    ) -> tuple[dict[bytes, list[Output]], dict[str, bool]]:
        """Abort every request with one of these labels or names (`Request.name`).

        Return the final Outputs per client, and for each name whether it matched a request. If two
        names match one request, both count as matched.
        """
        found = {name: self.open_requests.find_by_name(name) for name in names}
        ends: dict[bytes, list[Output]] = {}
        for request in dict.fromkeys(chain.from_iterable(found.values())):
            ends.setdefault(request.client, []).append(self._finish_request(request, "abort"))
        return ends, {name: bool(requests) for name, requests in found.items()}

    def on_client_lost(self, client: bytes) -> None:
        """Abort all requests of a client that has sent Goodbye, was dropped (clients.py), or opens
        a new session with another Hello. Their last Outputs are not returned."""
        for request in self.open_requests.from_client(client):
            self._finish_request(request, "abort")

    # ---- plan

    @property
    def num_in_flight(self) -> int:
        """The number of plans that were sent to the worker and not committed yet."""
        return len(self._inflight) + len(self.encoding.inflight)

    @property
    def is_idle(self) -> bool:
        return not self.open_requests and not self.num_in_flight and self.kv_transfers.is_idle

    def plan(self) -> StepPlan | EncodePlan | None:
        """Decide the next step and allocate what it needs. Return None if there is nothing to
        compute, or if a plan in flight must commit first."""
        encoding = self.encoding
        if not encoding.num_open and not encoding.inflight:
            return None if self._inflight.is_full else self._plan_generation()
        if self.num_in_flight >= self._config.steps_in_flight:
            return None
        if encoding.has_work and (encoding.is_next or not self.scheduler.has_work):
            return self._plan_encoding()
        plan = self._plan_generation()
        if plan is not None:
            encoding.is_next = True
        elif encoding.has_work and not self._inflight:  # all that generate wait for K/V
            return self._plan_encoding()
        return plan

    def _plan_encoding(self) -> EncodePlan:
        self._step += 1
        self.encoding.is_next = False
        return self.encoding.plan(self._step)

    def _plan_generation(self) -> StepPlan | None:
        if not self.scheduler.has_work:
            return None
        is_shared = self.scheduler.fair_share.is_shared(self._clock.now)
        if self._inflight and self._must_wait(is_shared=is_shared):
            return None
        schedule = self.scheduler.schedule(is_shared=is_shared)
        self._counts["preemptions"] += len(schedule.preempted)
        rows = RowColumns.from_schedule(schedule)
        if not rows.requests:
            return None
        for request in schedule.admitted:
            self._num_admitted_tokens += len(request.tokens)
            if not request.num_preemptions:
                self._counts["prompt_tokens"] += request.prompt_tokens
                self._counts["cached_tokens"] += request.num_cached
        charge_rows(rows.requests, rows.counts)
        for request in [request for request in rows.requests if request.kv_readers]:
            if request not in schedule.partial:
                self.kv_transfers.announce(request)
        self._step += 1
        for request in schedule.admitted:
            self.history.on_bound(request, self._step)
        releases = self.scheduler.slots.drain_releases()
        plan = build_plan(self._step, schedule, rows, releases, self._inflight.newest)
        self._inflight.on_sent(plan, rows.requests)
        return plan

    def _must_wait(self, *, is_shared: bool) -> bool:
        """Return whether the plans in flight must commit before the next step is planned.

        They must if the next step may preempt a request, or if its drafts depend on a result in
        flight. The next step also waits for a long prefill step, and for any prefill step if
        accounts share the engine, so that it can include a request that arrives meanwhile.
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
        """Return the masks of the oldest plan in flight.

        Return None if they were returned already, or if no grammar constrains the plan's rows. A
        mask depends on all tokens before it. So it can be computed only after the previous plan has
        committed, when its own plan has become the oldest.
        """
        step = self._inflight.oldest
        if step is None or not step.needs_masks:
            return None
        step.needs_masks = False
        matchers = mask_matchers(step.plan, step.requests)
        return Masks(step=step.plan.step, bits=compute_masks(matchers, self._model.vocab_size))

    # ---- commit

    def commit(self, result: StepResult, elapsed_s: float) -> dict[bytes, Outputs]:
        """Apply the result of the oldest plan in flight, and return the outputs of each client.

        `elapsed_s` is the time in seconds since the plan was sent, or since the previous result if
        that came later. Raises RuntimeError if the result belongs to another plan, or does not fit
        the plan.
        """
        step, results = self._inflight.on_completed(result)
        num_rows, num_computed = len(step.requests), step.num_tokens
        if self._speculation.is_enabled and not step.prompts:
            self._speculation.observe(num_rows, num_computed, step.num_requested_drafts, elapsed_s)
        self._counts["computed_tokens"] += num_computed
        self.throughput.observe(num_computed, elapsed_s, has_prompts=step.has_prompts)
        if len(self.scheduler.waiting):
            self.throughput.admitted.observe(self._num_admitted_tokens, elapsed_s)
        self._num_admitted_tokens = 0
        self.history.on_step(step, num_computed, elapsed_s, self.scheduler.lack)
        self._release_ended()
        outputs = self._commit_rows(step, results)
        load = self.load
        return {
            client: Outputs(step=result.step, outputs=own, load=load)
            for client, own in outputs.items()
        }

    def commit_encoded(self, result: EncodeResult, elapsed_s: float) -> dict[bytes, Outputs]:
        """Apply the result of the oldest plan in flight that encodes, and return the outputs of
        each client. `elapsed_s` is that of `commit`.

        Raises RuntimeError if the result belongs to another plan, or does not fit the plan.
        """
        step, parts = self.encoding.commit(result)
        self._counts["computed_tokens"] += step.num_tokens
        self.throughput.observe_encoding(step.num_tokens, elapsed_s)
        self.history.on_encoded(step, elapsed_s, self.scheduler.lack)
        outputs: dict[bytes, list[Output]] = {}
        for part in parts:
            request, progress = part.request, part.request.encode
            assert progress is not None
            if part.is_failed:
                error = StepFailed("a result of this request is not a finite number")
                end = self._finish_request(request, "error", CommittedTokens(error=error))
            elif progress.is_done:
                self._counts["prompt_tokens"] += request.prompt_tokens
                end = self._finish_request(request, "stop")
            else:
                continue
            outputs.setdefault(request.client, []).append(end)
        load = self.load
        return {
            client: Outputs(step=result.step, outputs=own, load=load)
            for client, own in outputs.items()
        }

    def _commit_rows(
        self, step: InflightStep, results: StepRowResults
    ) -> dict[bytes, list[Output]]:
        """Apply the rows of a committed step in order, and return the outputs of each client.

        Rows with a quiet token (columns.py) are applied here, and the others by `_commit_row`,
        which is the reference: both do the same to a row with a quiet token.
        """
        counts, starts = step.counts, step.plan.row_starts.tolist()
        quiet = quiet_tokens(step.requests, starts, results.tokens, step.plan.num_decodes)
        self._counts["generated_tokens"] += len(quiet) - quiet.count(None)
        # `advance` is needed only after every `size` positions, when a block is full; elsewhere it
        # just counts. If blocks are freed while requests run, it is needed after every position.
        size = 1 if self.scheduler.tables.frees_blocks else self.limits.block_tokens
        outputs: dict[bytes, list[Output]] = {}
        client, own = None, []
        rows = range(len(step.requests))
        for row, request, start, token in zip(rows, step.requests, starts, quiet, strict=True):
            if token is None:
                if request.phase is not RequestPhase.RUNNING:
                    continue
                output = self._commit_row(request, counts[row], results[row])
                if output is None:
                    continue
            else:
                request.tokens.append(token)
                if request.account is not None:
                    self._accounts.charge_tokens(request.account, 1)
                if (start + 1) % size:
                    request.num_computed += 1
                else:
                    self.scheduler.advance(request, 1)
                output = Output(
                    request=request.number,
                    tokens=[token],
                    logprobs=NO_LOGPROBS,
                    prompt_logprobs=NO_LOGPROBS,
                )
            if request.client != client:
                client = request.client
                own = outputs.setdefault(client, [])
            own.append(output)
        return outputs

    def _release_ended(self) -> None:
        """Release the slots and blocks of ended requests whose steps in flight have committed."""
        still = []
        for request in self._ended_in_flight:
            if request.num_in_flight:
                still.append(request)
            else:
                self._release(request)
        self._ended_in_flight = still

    def _release(self, request: Request) -> None:
        """Release the slot and blocks of an ended request. No step or fetch may still write to
        them."""
        if request.encode is None:
            self.scheduler.finish(request)
        else:
            self.encoding.finish(request)
        if request in self._aborted:
            self._aborted.remove(request)
            self.freed.setdefault(request.client, []).append(request.number)

    def _commit_row(self, request: Request, count: int, row_result: RowResult) -> Output | None:
        """Apply one row of a committed step, and return the Output for its client. Return None
        while the prompt is being computed."""
        committed = commit_row(request, count, row_result)
        self._counts["generated_tokens"] += len(committed.tokens)
        if request.account is not None:
            self._accounts.charge_tokens(request.account, len(committed.tokens))
        self._counts["draft_tokens"] += row_result.num_drafts
        self._counts["accepted_tokens"] += committed.num_accepted
        self.scheduler.advance(request, committed.num_valid)
        if committed.tokens and request.num_generated == len(committed.tokens):
            self.history.on_first_token(request)
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
        """End a request, and return its final Output with the tokens of the last step. Every
        accepted request ends here."""
        if not committed.kv_handle:
            self.kv_transfers.retract(request)
        last = final_output(request, finish, committed, self._model)
        self.open_requests.remove(request)
        self._deadlines.remove(request)
        self.admission.on_request_ending(request)
        self._finished[finish] += 1
        self.history.on_end(request, finish, last.usage)
        is_fetching = request.phase is RequestPhase.FETCHING
        request.move(RequestEvent.FINISH)
        if is_fetching:
            self.kv_transfers.cancel_fetch(request)  # `on_kv_report` releases its slot and blocks
        elif request.num_in_flight and request.encode is None:
            self._ended_in_flight.append(request)
        else:
            self._release(request)
        return last

    # ---- deadlines and K/V transfer

    @property
    def next_deadline(self) -> float:
        """The earliest deadline of all requests, on the clock of `tick`. `tick` ends no request
        before it."""
        return self._deadlines.next_at

    def tick(self, now: float) -> dict[bytes, Outputs]:
        """Set the engine's clock to `now`, in seconds of a steady clock. Expire leases, and end the
        requests that are past a deadline. Return their final Outputs per client."""
        self.kv_transfers.tick(now)
        self._accounts.now = self._clock.now = now
        outputs: dict[bytes, list[Output]] = {}
        for request in self._deadlines.pop_late(now):
            self._timeouts["running" if has_started(request) else "queued"] += 1
            error = timeout_error(request, now, self.admission.retry_after_s(request))
            outputs.setdefault(request.client, []).append(
                self._finish_request(request, "error", CommittedTokens(error=error))
            )
        return {client: Outputs(step=0, outputs=own) for client, own in outputs.items()}

    def drain_kv_commands(self) -> list[KVCommand]:
        """Return the K/V commands for the worker since the last call, in order.

        The caller must send them before any later plan, and before it sends Outputs to clients: a
        handle in an Output must not reach a reader before the worker has the lease.
        """
        commands, self.kv_transfers.commands = self.kv_transfers.commands, []
        return commands

    def drain_kv_events(self) -> list[KVEvent]:
        """Return the changes of the prefix cache since the last call, in order. The first event is
        AllBlocksCleared. There are no events unless `EngineConfig.kv_events` is set."""
        return self._cache_events.drain() if self._cache_events is not None else []

    def keep_kv(self, handles: Iterable[str]) -> None:
        """Renew the leases of these handles, unless the engine is draining."""
        if not self.is_draining:
            self.kv_transfers.renew(handles)

    def release_kv(self, handles: Iterable[str]) -> None:
        """End the leases of these handles, which no reader needs any more."""
        self.kv_transfers.release(handles)

    def on_kv_report(self, report: KVReport) -> dict[bytes, Outputs]:
        """Apply the worker's report on fetches, leases and tiers.

        Return the final Outputs, per client, of requests that cannot continue without their K/V.
        Raises RuntimeError if the report names a job that is not open, and KeyError if it names an
        unknown tier.
        """
        outputs: dict[bytes, list[Output]] = {}
        for fetch in self.kv_transfers.on_kv_report(report):
            if (output := self._on_fetch_over(fetch)) is not None:
                outputs.setdefault(fetch.request.client, []).append(output)
        return {client: Outputs(step=0, outputs=own) for client, own in outputs.items()}

    def oldest_fetch_s(self, now: float) -> float:
        """Return the age in seconds of the oldest fetch without a report; 0 if there is none."""
        return self.kv_transfers.fetches.oldest_s(now)

    def _on_fetch_over(self, fetch: Fetch) -> Output | None:
        """Continue the request of a fetch that is over, or release its slot and blocks if it has
        already ended. Return the request's final Output if the fetch of a handed-over prompt
        failed and the prompt may not be recomputed here."""
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

    # ---- LoRA adapters

    def load_adapter(self, client: bytes, message: LoadAdapter) -> Refused | None:
        """Start to load an adapter, or refuse to. Return None if `on_adapter_report` will return
        the reply."""
        try:
            if self.is_draining:
                raise Draining("this server is shutting down and loads no adapters")
            self.adapters.load(client, message)
        except ServingError as error:
            return Refused(request=message.request, error=error.info())
        return None

    def unload_adapter(self, client: bytes, message: UnloadAdapter) -> Refused | None:
        """Refuse new requests for an adapter, and free it once its open ones have ended; or refuse
        that. Return None if `on_adapter_report` will return the reply."""
        try:
            self.adapters.unload(client, message)
        except ServingError as error:
            return Refused(request=message.request, error=error.info())
        return None

    def drain_adapter_commands(self) -> list[AdapterCommand]:
        """Return the commands about adapters for the worker since the last call, in order. The
        caller must send them before any later plan."""
        if self.adapters.is_leaving:
            owners = [*self.open_requests, *self.scheduler.running, *self.scheduler.unbound]
            self.adapters.unload_unused({each.adapter for each in owners if each.adapter})
        commands, self.adapters.commands = self.adapters.commands, []
        return commands

    def on_adapter_report(self, report: AdapterReport) -> tuple[bytes, AdapterReply]:
        """Apply the worker's answer to a command. Return the client that waits for it, and the
        reply. Raises RuntimeError if the report answers no command."""
        return self.adapters.on_report(report)

    # ---- status

    @property
    def num_open(self) -> int:
        """The number of requests that have not ended."""
        return len(self.open_requests)

    @property
    def names(self) -> list[str]:
        """The name of each open request; `abort_by_label` accepts these names."""
        return [request.name for request in self.open_requests]

    def status_rows(self, max_rows: int) -> list[tuple[bytes, RequestStatus]]:
        """Return (client, row) of the `max_rows` oldest requests, at most MAX_STATUS_ROWS."""
        oldest = islice(self.open_requests, min(max(max_rows, 0), MAX_STATUS_ROWS))
        lack = self.scheduler.lack
        return [(request.client, status_row(request, lack)) for request in oldest]

    def timelines(
        self, names: Iterable[str], client_name: Callable[[bytes], str]
    ) -> list[EngineTimeline]:
        """Return the timelines of the open and recently ended requests with these names.
        `client_name` returns the name of a client."""
        return self.history.timelines(names, self.open_requests.find_by_name, client_name)

    @property
    def block_counts(self) -> BlockCounts:
        pool, leased = self.scheduler.pool, self.kv_transfers.leases.num_blocks
        return BlockCounts(
            requests=pool.total - pool.num_free - leased,
            leased=leased,
            cached=pool.num_cached,
            free=pool.num_free - pool.num_cached,
        )

    def worker_view(self) -> WorkerStatus:
        """Describe the step that the worker computes, which is the oldest plan in flight. The
        caller adds the measured times."""
        step = self._inflight.oldest
        if step is None:
            return WorkerStatus()
        rate = self.throughput.tokens_per_s
        return WorkerStatus(
            step=step.plan.step,
            expected_s=step.num_tokens / rate if rate else 0.0,
            prompt_tokens=sum(request.prompt_tokens for request in step.prompts),
            computed_tokens=sum(request.num_computed for request in step.prompts),
        )

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is. It takes constant time, because it is sent after each step."""
        scheduler, encoding = self.scheduler, self.encoding
        num_started, tokens = 0, scheduler.waiting.tokens + scheduler.num_prefill_tokens
        if encoding.num_open:
            num_started = encoding.num_started
            tokens += encoding.waiting.tokens + encoding.num_started_tokens
        return EngineLoad(
            running=len(scheduler.running) + len(scheduler.unbound) + num_started,
            waiting=self.admission.num_waiting,
            queued_tokens=tokens,
        )

    def stats(self, *, clients: int = 0, wire_errors: int = 0) -> EngineStats:
        scheduler, leases = self.scheduler, self.kv_transfers.leases
        fetches, tiers = self.kv_transfers.fetches, self.kv_transfers.tiers
        by_adapter = [(r.adapter.name, r.slot is None) for r in self.open_requests if r.adapter]
        return EngineStats(
            draining=self.is_draining,
            running=sum(request.slot is not None for request in self.open_requests)
            + self.encoding.num_started,
            waiting=self.admission.num_waiting,
            waiting_tokens=scheduler.waiting.tokens + self.encoding.waiting.tokens,
            free_blocks=scheduler.pool.num_free,
            total_blocks=scheduler.pool.total,
            clients=clients,
            fetching=len(fetches),
            leases=len(leases),
            leased_blocks=leases.num_blocks,
            kv_dtype=self._config.worker.kv_dtype,
            max_adapters=self.limits.max_adapters,
            num_adapter_requests=self.adapters.num_requests,
            adapters_running=Counter(name for name, is_waiting in by_adapter if not is_waiting),
            adapters_waiting=Counter(name for name, is_waiting in by_adapter if is_waiting),
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
        """Check every invariant of slots, blocks and the prefix cache by brute force; for tests and
        replays."""
        self.adapters.check(self.open_requests)
        check_invariants(
            self.scheduler,
            self.kv_transfers.leases,
            [each for each in self.open_requests if each.encode is None],
            self._ended_in_flight,
        )
        check_encoding(
            self.encoding, [each for each in self.open_requests if each.encode is not None]
        )
