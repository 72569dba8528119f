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
    commit_encoded(EncodeResult)     -> Outputs of failed requests per client
    pop_results(client, bytes)       -> Outputs with results of encoding
    tick(now)                        -> Outputs of requests that missed a deadline, per client
    drain_kv_commands()              -> K/V commands to send to the worker before the next plan
    drain_kv_events()                -> changes of the prefix cache, for subscribers
    on_kv_report(KVReport)           -> Outputs per client
    load_adapter, unload_adapter     -> Refused, or None: on_adapter_report returns the reply. Their
                                        commands (`adapters.drain_commands`) must be sent to the
                                        worker before the next plan
    on_adapter_report(AdapterReport) -> (client, AdapterChanged or Refused)
    attach(digest, tensors, bytes)   keeps the content of an image. `images.drain_commands` must be
                                        sent to the worker before the next plan
    on_image_encoded(ImageEncoded)   -> Outputs per client of the requests whose image has failed

`parts.py` builds its parts, `schedule/` decides what each step computes, and every request ends in
`endings.py`. The engine has no socket and no clock; times are arguments.

At most `steps_in_flight` plans are in flight (schedule/), so a step can be planned before the
tokens of the previous one are known. A slot or block that a step in flight may still write to is
not reused until that step has committed. A request that ends earlier keeps its slot and blocks
until then.

These invariants are checked by `check()` and by the property tests:

- every block is either free or held;
- the holders of a block are the requests and leases that list it;
- a block in the prefix cache was written by a committed step, or fetched;
- no two requests own the same slot;
- each accepted request ends exactly once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from engine_core.adapters import AdapterReply
from engine_core.endings import RequestEndings
from engine_core.grammar.jobs import CompiledGrammar, CompileJob
from engine_core.grammar.masks import compute_masks
from engine_core.history.history import TimelineWork
from engine_core.invariants import check_encoding, check_images, check_invariants
from engine_core.kv.fetches import Fetch, FetchState
from engine_core.kv.peers import PeerCluster
from engine_core.kv.transfers import KVCommand
from engine_core.parts import build_parts
from engine_core.policy.deadlines import has_started, timeout_error
from engine_core.policy.fair_share import charge_rows
from engine_core.requests.request import Request, RequestPhase
from engine_core.schedule.columns import quiet_tokens
from engine_core.schedule.commit import (
    NO_LOGPROBS,
    CommittedTokens,
    commit_row,
    progress_output,
)
from engine_core.schedule.inflight import InflightStep
from engine_core.schedule.plan import RowColumns, build_plan, mask_matchers
from engine_core.schedule.row_results import RowResult, StepRowResults
from engine_core.status import (
    engine_load,
    engine_stats,
    engine_status,
    worker_status,
)
from protocol.config.engine import EngineConfig
from protocol.engine.adapters import AdapterInfo
from protocol.engine.attachments import AttachedTensor
from protocol.engine.kv_events import KVEvent
from protocol.engine.messages import (
    Accepted,
    Encode,
    EngineStatus,
    Generate,
    GetStatus,
    Limits,
    LoadAdapter,
    Output,
    Outputs,
    Refused,
    UnloadAdapter,
)
from protocol.engine.model_card import ModelCard
from protocol.engine.stats import EngineLoad, EngineStats, WorkerStatus
from protocol.engine.timeline import AbortReason
from protocol.wire.errors import Draining, InvalidRequest, ServingError, StepFailed
from protocol.worker.kv import KVReport
from protocol.worker.steps import (
    AdapterReport,
    EncodePlan,
    EncodeResult,
    ImageEncoded,
    Masks,
    StepPlan,
    StepResult,
)


def draw_seed() -> int:
    return secrets.randbits(63)


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
        self._parts = parts = build_parts(
            config,
            model,
            limits,
            draft_cost=draft_cost,
            step_costs=step_costs,
            draw_seed=draw_seed,
            cluster=cluster,
            tiers=tiers,
            adapters=adapters,
        )
        self.limits = limits
        self.clock = parts.clock
        self.totals = parts.totals
        self.throughput = parts.throughput
        self.accounts = parts.accounts
        self.deadlines = parts.deadlines
        self.open_requests = parts.open_requests
        self.admission = parts.admission
        self.scheduler = parts.scheduler
        self.encoding = parts.encoding
        self.inflight = parts.inflight
        self.speculation = parts.speculation
        self.kv_transfers = parts.kv_transfers
        self.adapters = parts.adapters
        self.images = parts.images
        self.history = parts.history
        self.endings = RequestEndings(parts)

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

    def attach(self, digest: str, tensors: list[AttachedTensor], num_bytes: int) -> None:
        """Keep the content of an image for the requests that will name its digest. In a replay,
        `tensors` is empty."""
        self.images.content.add(digest, tensors, num_bytes)

    def on_image_encoded(self, message: ImageEncoded) -> dict[bytes, Outputs]:
        """Apply the worker's report on an image. Return the outputs of each client whose requests
        have failed, because the image could not be encoded."""
        images = self.images
        images.on_encoded(message.digest, message.encode_s, has_failed=bool(message.error))
        outputs: dict[bytes, list[Output]] = {}
        if message.error:
            error = InvalidRequest.at("attachments", message.error)
            users = images.content.users.get(message.digest, set())
            for request in sorted(users, key=lambda user: user.order):
                if request.phase is not RequestPhase.FINISHED:
                    end = self.endings.finish(request, "error", CommittedTokens(error=error))
                    outputs.setdefault(request.client, []).append(end)
        return self._messages(0, outputs)

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

    def abort(
        self, client: bytes, numbers: Sequence[int], reason: AbortReason = ""
    ) -> list[Output]:
        """End these requests of `client`, and return their final Outputs. Numbers of requests that
        are not open are ignored. The timelines of the requests show `reason`, which changes no
        decision."""
        found = [self.open_requests.find(client, number) for number in dict.fromkeys(numbers)]
        requests = [request for request in found if request is not None]
        return self.endings.abort(requests, reason)

    def abort_by_label(
        self, names: Sequence[str]
    ) -> tuple[dict[bytes, list[Output]], dict[str, bool]]:
        """Abort every request with one of these labels or names (`Request.name`).

        Return the final Outputs per client, and for each name whether it matched a request. If two
        names match one request, both count as matched.
        """
        found = {name: self.open_requests.find_by_name(name) for name in names}
        ends: dict[bytes, list[Output]] = {}
        for request in dict.fromkeys(chain.from_iterable(found.values())):
            end = self.endings.finish(request, "abort", abort_reason="by_id")
            ends.setdefault(request.client, []).append(end)
        return ends, {name: bool(requests) for name, requests in found.items()}

    def on_client_lost(self, client: bytes) -> None:
        """Abort all requests of a client that has sent Goodbye, was dropped
        (connections/clients.py), or opens a new session with another Hello. Their last Outputs are
        not returned."""
        for request in self.open_requests.from_client(client):
            self.endings.finish(request, "abort", abort_reason="client_lost")

    # ---- plan

    @property
    def num_in_flight(self) -> int:
        """The number of plans that were sent to the worker and not committed yet."""
        return len(self.inflight) + len(self.encoding.inflight)

    @property
    def is_idle(self) -> bool:
        return not self.open_requests and not self.num_in_flight and self.kv_transfers.is_idle

    def plan(self) -> StepPlan | EncodePlan | None:
        """Decide the next step and allocate what it needs. Return None if there is nothing to
        compute, or if a plan in flight must commit first.

        Steps that generate and steps that encode take turns if both have work.
        """
        encoding = self.encoding
        if not encoding.num_open and not encoding.inflight:
            return None if self.inflight.is_full else self._plan_generation()
        if self.num_in_flight >= self._parts.config.steps_in_flight:
            return None
        encoding.update_held()
        if encoding.has_work and (encoding.is_next or not self.scheduler.has_work):
            return self._plan_encoding()
        plan = self._plan_generation()
        if plan is not None:
            encoding.on_generation_planned()
        elif encoding.has_work and not self.inflight:  # all that generate wait for K/V
            return self._plan_encoding()
        return plan

    def _plan_encoding(self) -> EncodePlan:
        self.totals.step += 1
        is_shared = self.scheduler.fair_share.is_shared(self.clock.now)
        is_limited = is_shared and self.scheduler.has_work
        return self.encoding.plan(self.totals.step, is_limited=is_limited)

    def _plan_generation(self) -> StepPlan | None:
        scheduler, totals = self.scheduler, self.totals
        if not scheduler.has_work:
            return None
        is_shared = scheduler.fair_share.is_shared(self.clock.now)
        if self.inflight and self._must_wait(is_shared=is_shared):
            return None
        schedule = scheduler.schedule(is_shared=is_shared)
        totals.counts["preemptions"] += len(schedule.preempted)
        rows = RowColumns.from_schedule(schedule)
        if not rows.requests:
            return None
        for request in schedule.admitted:
            totals.num_admitted_tokens += len(request.tokens)
            if not request.num_preemptions:
                totals.counts["prompt_tokens"] += request.prompt_tokens
                totals.counts["cached_tokens"] += request.num_cached
                if scheduler.checkpointing is not None:
                    uncovered = scheduler.checkpointing.num_uncovered(request)
                    totals.counts["uncovered_tokens"] += uncovered
        charge_rows(rows.requests, rows.counts)
        for request in [request for request in rows.requests if request.kv_readers]:
            if request not in schedule.partial:
                self._announce(request)
        totals.step += 1
        for request in schedule.admitted:
            self.history.on_bound(request, totals.step)
        releases = scheduler.slots.drain_releases()
        plan = build_plan(totals.step, schedule, rows, releases, self.inflight.newest)
        self.inflight.on_sent(plan, rows.requests)
        return plan

    def _announce(self, request: Request) -> None:
        """Announce the lease of a request whose last tokens the next plan computes."""
        checkpointing = self.scheduler.checkpointing
        checkpoint = None if checkpointing is None else checkpointing.keep_for_lease(request)
        self.kv_transfers.announce(request, checkpoint)

    def _must_wait(self, *, is_shared: bool) -> bool:
        """Return whether the plans in flight must commit before the next step is planned.

        They must if the next step may preempt a request, or if its drafts depend on a result in
        flight. The next step also waits for a long prefill step, and for any prefill step if
        accounts share the engine, so that it can include a request that arrives meanwhile.
        """
        scheduler = self.scheduler
        prompt_tokens = self.inflight.num_prompt_tokens
        return (
            not scheduler.can_continue()
            or self.inflight.are_decisive
            or (prompt_tokens > 0 and (is_shared or self.throughput.is_long_step(prompt_tokens)))
            or self.speculation.should_wait(scheduler.running, len(scheduler.running))
        )

    def masks(self) -> Masks | None:
        """Return the masks of the oldest plan in flight.

        Return None if they were returned already, or if no grammar constrains the plan's rows. A
        mask depends on all tokens before it. So it can be computed only after the previous plan has
        committed, when its own plan has become the oldest.
        """
        step = self.inflight.oldest
        if step is None or not step.needs_masks:
            return None
        step.needs_masks = False
        matchers = mask_matchers(step.plan, step.requests)
        bits = compute_masks(matchers, self._parts.model.vocab_size)
        return Masks(step=step.plan.step, bits=bits)

    # ---- commit

    def commit(self, result: StepResult, elapsed_s: float) -> dict[bytes, Outputs]:
        """Apply the result of the oldest plan in flight, and return the outputs of each client.

        `elapsed_s` is the time in seconds since the plan was sent, or since the previous result if
        that came later. Raises RuntimeError if the result belongs to another plan, or does not fit
        the plan.
        """
        totals, throughput = self.totals, self.throughput
        step, results = self.inflight.on_completed(result)
        num_rows, num_computed = len(step.requests), step.num_tokens
        if self.speculation.is_enabled and not step.prompts:
            self.speculation.observe(num_rows, num_computed, step.num_requested_drafts, elapsed_s)
        totals.counts["computed_tokens"] += num_computed
        throughput.observe(num_computed, elapsed_s, has_prompts=step.has_prompts)
        if len(self.scheduler.waiting):
            throughput.admitted.observe(totals.num_admitted_tokens, elapsed_s)
        totals.num_admitted_tokens = 0
        self.history.on_step(step, num_computed, elapsed_s, self.scheduler.lack)
        self.endings.release_committed()
        outputs = self._commit_rows(step, results)
        if self.scheduler.checkpointing is not None:
            self.scheduler.checkpointing.on_committed(step)
        return self._messages(result.step, outputs)

    def commit_encoded(self, result: EncodeResult, elapsed_s: float) -> dict[bytes, Outputs]:
        """Apply the result of the oldest plan in flight that encodes, and return the outputs of
        each client whose requests have failed. `elapsed_s` is that of `commit`. `pop_results`
        returns the results of requests that are done.

        Raises RuntimeError if the result belongs to another plan, or does not fit the plan.
        """
        counts = self.totals.counts
        step, encoded = self.encoding.commit(result)
        counts["computed_tokens"] += step.num_tokens
        self.throughput.observe_encoding(step.num_tokens, elapsed_s)
        self.history.on_encoded(step, elapsed_s, self.scheduler.lack)
        outputs: dict[bytes, list[Output]] = {}
        for part in encoded:
            request, progress = part.request, part.request.encode
            assert progress is not None
            if part.is_failed:
                error = StepFailed("a result of this request is not a finite number")
                end = self.endings.finish(request, "error", CommittedTokens(error=error))
                outputs.setdefault(request.client, []).append(end)
            elif progress.is_done:
                counts["prompt_tokens"] += request.prompt_tokens
                self.encoding.unsent.add(request)
        return self._messages(result.step, outputs)

    def pop_results(self, client: bytes, num_bytes: int) -> Outputs:
        """End the first requests of `client` whose results are not sent, and return their last
        outputs: as many as have at most `num_bytes` together, and at least one. Raises KeyError if
        there are none."""
        requests = self.encoding.unsent.first(client, num_bytes)
        outputs = [self.endings.finish(request, "stop") for request in requests]
        return Outputs(step=0, outputs=outputs, load=self.load)

    def _messages(self, step: int, outputs: dict[bytes, list[Output]]) -> dict[bytes, Outputs]:
        load = self.load
        return {
            client: Outputs(step=step, outputs=own, load=load) for client, own in outputs.items()
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
        self.totals.counts["generated_tokens"] += len(quiet) - quiet.count(None)
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
                    self.accounts.charge_tokens(request.account, 1)
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

    def _commit_row(self, request: Request, count: int, row_result: RowResult) -> Output | None:
        """Apply one row of a committed step, and return the Output for its client. Return None
        while the prompt is being computed."""
        counts = self.totals.counts
        committed = commit_row(request, count, row_result)
        counts["generated_tokens"] += len(committed.tokens)
        if request.account is not None:
            self.accounts.charge_tokens(request.account, len(committed.tokens))
        counts["draft_tokens"] += row_result.num_drafts
        counts["accepted_tokens"] += committed.num_accepted
        self.scheduler.advance(request, committed.num_valid)
        if committed.tokens and request.num_generated == len(committed.tokens):
            self.history.on_first_token(request)
        if committed.finish is not None:
            return self.endings.finish(request, committed.finish, committed)
        if committed.tokens:
            return progress_output(request, committed)
        if request.samples or request.num_computed < len(request.tokens):
            return None
        if request.kv_readers:
            committed.kv_handle = self.kv_transfers.hand_over(request)
        return self.endings.finish(request, "length", committed)

    def pop_freed(self) -> dict[bytes, list[int]]:
        """Return client -> numbers of its aborted requests whose slot and blocks have become
        free since the last call."""
        freed, self.endings.freed = self.endings.freed, {}
        return freed

    # ---- deadlines and K/V transfer

    def tick(self, now: float) -> dict[bytes, Outputs]:
        """Set the engine's clock to `now`, in seconds of a steady clock. Expire leases, and end the
        requests that are past a deadline. Return their final Outputs per client."""
        self.kv_transfers.tick(now)
        self.accounts.now = self.clock.now = now
        outputs: dict[bytes, list[Output]] = {}
        for request in self.deadlines.pop_late(now):
            self.totals.timeouts["running" if has_started(request) else "queued"] += 1
            error = timeout_error(request, now, self.admission.retry_after_s(request))
            outputs.setdefault(request.client, []).append(
                self.endings.finish(request, "error", CommittedTokens(error=error))
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
        events = self._parts.cache_events
        return [] if events is None else events.drain()

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

    def _on_fetch_over(self, fetch: Fetch) -> Output | None:
        """Continue the request of a fetch that is over, or release its slot and blocks if it has
        already ended. Return the request's final Output if the fetch of a handed-over prompt
        failed and the prompt may not be recomputed here."""
        request = fetch.request
        if fetch.state is FetchState.DROPPED:
            self.endings.release(request)
            return None
        if fetch.state is FetchState.ARRIVED:
            self.scheduler.on_fetch_over(request, fetch.match, is_fetched=True)
            return None
        self.scheduler.on_fetch_over(request, fetch.match, is_fetched=False)
        if not fetch.match.is_handed_over or self._parts.config.kv_on_failure == "recompute":
            return None
        error = StepFailed(f"the prompt's K/V could not be fetched ({fetch.error})")
        return self.endings.finish(request, "error", CommittedTokens(error=error))

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

    def compute_timelines(
        self,
        names: Iterable[str],
        client_name: Callable[[bytes], str],
        *,
        are_beginnings: bool = False,
    ) -> TimelineWork:
        """Compute the timelines of the open and recently ended requests with these names, or whose
        names begin so. `client_name` returns the name of a client."""
        find = self.open_requests
        find_open = find.find_by_beginning if are_beginnings else find.find_by_name
        return self.history.compute_timelines(
            names, find_open, client_name, are_beginnings=are_beginnings
        )

    def worker_view(self) -> WorkerStatus:
        """Describe the step that the worker computes. The caller adds the measured times."""
        return worker_status(self.inflight, self.throughput)

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is."""
        return engine_load(self._parts)

    def stats(self, *, clients: int = 0, wire_errors: int = 0) -> EngineStats:
        return engine_stats(self._parts, clients=clients, wire_errors=wire_errors)

    def status(
        self,
        message: GetStatus,
        *,
        now: float,
        stats: EngineStats,
        client_name: Callable[[bytes], str],
    ) -> EngineStatus:
        """Return the answer to a GetStatus. `client_name` returns the name of a client."""
        return engine_status(self._parts, message, now=now, stats=stats, client_name=client_name)

    def check(self) -> None:
        """Check every invariant of slots, blocks and the prefix cache by brute force; for tests and
        replays."""
        owners = [*self.open_requests, *self.scheduler.running, *self.scheduler.unbound]
        self.adapters.check(owners)
        check_invariants(
            self.scheduler,
            self.kv_transfers.leases,
            [each for each in self.open_requests if each.encode is None],
            self.endings.in_flight,
        )
        check_images(self.images, owners)
        check_encoding(
            self.encoding, [each for each in self.open_requests if each.encode is not None]
        )
