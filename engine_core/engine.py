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
    load_adapter, unload_adapter     -> Refused, or None: on_adapter_report returns the reply
    drain_adapter_commands()         -> commands about LoRA adapters, to send before the next plan
    on_adapter_report(AdapterReport) -> (client, AdapterChanged or Refused)

`parts.py` builds its parts, `schedule/planner.py` plans, `schedule/committer.py` applies results,
and every request ends in `endings.py`. The engine has no socket and no clock; times are arguments.

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

from engine_core.adapters.registry import AdapterCommand, AdapterReply
from engine_core.endings import RequestEndings
from engine_core.grammar.cache import CompiledGrammar, CompileJob
from engine_core.history.history import TimelineWork
from engine_core.invariants import check_encoding, check_invariants
from engine_core.kv.fetches import Fetch, FetchState
from engine_core.kv.peers import PeerCluster
from engine_core.kv.transfers import KVCommand
from engine_core.parts import build_parts
from engine_core.policy.deadlines import has_started, timeout_error
from engine_core.schedule.commit import CommittedTokens
from engine_core.schedule.committer import StepCommitter
from engine_core.schedule.planner import StepPlanner
from engine_core.status import (
    engine_load,
    engine_stats,
    worker_status,
)
from protocol.config.engine import EngineConfig
from protocol.engine.adapters import AdapterInfo
from protocol.engine.kv_events import KVEvent
from protocol.engine.messages import (
    Accepted,
    Encode,
    Generate,
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
from protocol.wire.errors import Draining, ServingError, StepFailed
from protocol.worker.kv import KVReport
from protocol.worker.steps import (
    AdapterReport,
    EncodePlan,
    EncodeResult,
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
        self.parts = parts = build_parts(
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
        self.totals = parts.totals
        self.admission = parts.admission
        self.open_requests = parts.open_requests
        self.scheduler = parts.scheduler
        self.encoding = parts.encoding
        self.kv_transfers = parts.kv_transfers
        self.adapters = parts.adapters
        self.history = parts.history
        self.endings = RequestEndings(parts)
        self._planner = StepPlanner(parts)
        self._committer = StepCommitter(parts, self.endings)

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

    def abort(
        self, client: bytes, numbers: Iterable[int], reason: AbortReason = ""
    ) -> list[Output]:
        """End these requests of `client`, and return their final Outputs. Numbers of requests that
        are not open are ignored. The timelines of the requests show `reason`, which changes no
        decision."""
        found = [self.open_requests.find(client, number) for number in dict.fromkeys(numbers)]
        requests = [request for request in found if request is not None]
        return self.endings.abort(requests, reason)

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
        return self._planner.num_in_flight

    @property
    def is_idle(self) -> bool:
        return not self.open_requests and not self.num_in_flight and self.kv_transfers.is_idle

    def plan(self) -> StepPlan | EncodePlan | None:
        """Decide the next step and allocate what it needs. Return None if there is nothing to
        compute, or if a plan in flight must commit first."""
        return self._planner.plan()

    def masks(self) -> Masks | None:
        """Return the masks of the oldest plan in flight. Return None if they were returned already,
        or if no grammar constrains the plan's rows."""
        return self._planner.masks()

    # ---- commit

    def commit(self, result: StepResult, elapsed_s: float) -> dict[bytes, Outputs]:
        """Apply the result of the oldest plan in flight, and return the outputs of each client.

        `elapsed_s` is the time in seconds since the plan was sent, or since the previous result if
        that came later. Raises RuntimeError if the result belongs to another plan, or does not fit
        the plan.
        """
        return self._committer.commit(result, elapsed_s)

    def commit_encoded(self, result: EncodeResult, elapsed_s: float) -> dict[bytes, Outputs]:
        """Apply the result of the oldest plan in flight that encodes. Otherwise as `commit`. The
        results of requests that are done wait for `pop_results`."""
        return self._committer.commit_encoded(result, elapsed_s)

    def pop_results(self, client: bytes, num_bytes: int) -> Outputs:
        """End the first requests of `client` whose results are not sent, and return their last
        outputs: as many as have at most `num_bytes` together, and at least one. Raises KeyError if
        there are none (`encoding.unsent`)."""
        return self._committer.pop_results(client, num_bytes)

    def pop_freed(self) -> dict[bytes, list[int]]:
        """Return client -> numbers of its aborted requests whose slot and blocks have become
        free since the last call."""
        freed, self.endings.freed = self.endings.freed, {}
        return freed

    # ---- deadlines and K/V transfer

    @property
    def next_deadline(self) -> float:
        """The earliest deadline of all requests, on the clock of `tick`. `tick` ends no request
        before it."""
        return self.parts.deadlines.next_at

    def tick(self, now: float) -> dict[bytes, Outputs]:
        """Set the engine's clock to `now`, in seconds of a steady clock. Expire leases, and end the
        requests that are past a deadline. Return their final Outputs per client."""
        self.kv_transfers.tick(now)
        self.parts.accounts.now = self.parts.clock.now = now
        outputs: dict[bytes, list[Output]] = {}
        for request in self.parts.deadlines.pop_late(now):
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
        events = self.parts.cache_events
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

    def oldest_fetch_s(self, now: float) -> float:
        """Return the age in seconds of the oldest fetch without a report; 0 if there is none."""
        return self.kv_transfers.fetches.oldest_s(now)

    def _on_fetch_over(self, fetch: Fetch) -> Output | None:
        """Continue the request of a fetch that is over, or release its slot and blocks if it has
        already ended. Return the request's final Output if the fetch of a handed-over prompt
        failed and the prompt may not be recomputed here."""
        request = fetch.request
        if fetch.state is FetchState.DROPPED:
            self.endings.release(request)
            return None
        if fetch.state is FetchState.ARRIVED:
            self.scheduler.on_fetch_over(request, fetch.match)
            return None
        self.scheduler.on_fetch_over(request, None)
        if not fetch.match.is_handed_over or self.parts.config.kv_on_failure == "recompute":
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

    def drain_adapter_commands(self) -> list[AdapterCommand]:
        """Return the commands about adapters for the worker since the last call, in order. The
        caller must send them before any later plan."""
        return self.adapters.drain_commands()

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
        return worker_status(self.parts.inflight, self.parts.throughput)

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is."""
        return engine_load(self.parts)

    def stats(self, *, clients: int = 0, wire_errors: int = 0) -> EngineStats:
        return engine_stats(self.parts, clients=clients, wire_errors=wire_errors)

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
        check_encoding(
            self.encoding, [each for each in self.open_requests if each.encode is not None]
        )
