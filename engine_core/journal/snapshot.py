"""Converts the state of an engine to plain data (`EngineSnapshot`) and back.

Every file of a journal except the first starts with a snapshot. Shared objects are listed once and
referred to by their index: requests in `EngineSnapshot.requests`, accounts in
`EngineSnapshot.usages`. Data that follow from other data are not stored. To restore them, a matcher
consumes the tokens of its answer again, and an n-gram index is built again. The configuration of
the engine is in the StartRecord.

A new attribute of the engine or its parts must be added here if a decision depends on it, and then
`records.FORMAT` must be increased. `tests/unit/test_snapshot.py` lists the stored attributes, and
the reasons why the others are not stored.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import fields

import msgspec

from engine_core.adapters import AdapterState, EngineAdapter
from engine_core.blocks.pool import BlockPool
from engine_core.encoding import EncodeProgress, EncodeScheduler, EncodeStep
from engine_core.engine import Engine
from engine_core.grammar.cache import CompileJob
from engine_core.grammar.matcher import Matcher, MatcherTemplate
from engine_core.kv.fetches import Fetch, FetchState, Match
from engine_core.kv.tiers import Tier
from engine_core.kv.transfers import KVTransfers
from engine_core.policy.accounts import AccountBuckets, AccountUsage
from engine_core.policy.admission import Admission
from engine_core.policy.fair_share import FairShare
from engine_core.policy.throughput import Throughput
from engine_core.request import Request, RequestPhase
from engine_core.schedule.inflight import InflightStep
from engine_core.schedule.scheduler import Scheduler
from engine_core.speculation.drafting import (
    AcceptanceTally,
    ModelDrafter,
    RequestDrafting,
    Speculation,
)
from engine_core.speculation.ngram import NgramDrafter
from engine_core.speculation.overhead import StepTimes
from engine_core.stage_timer import RequestStage, StageTimer
from protocol import wire
from protocol.messages import Account, TokenLogprobs
from protocol.sampling import SamplingParams
from protocol.steps import EncodePlan, SlotRelease, StepPlan

FindTemplate = Callable[[bytes], MatcherTemplate]
"""A function that returns the compiled grammar for a digest."""
_PLAN: wire.Decoder[StepPlan] = wire.Decoder(StepPlan)
_ENCODE_PLAN: wire.Decoder[EncodePlan] = wire.Decoder(EncodePlan)


class SnapshotPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of all parts. Decoding fails if a field is missing or unknown."""


class DraftingSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of a request's `RequestDrafting`."""

    #: Number of positions in the n-gram index; None if the drafts come from the draft model.
    num_indexed: int | None
    #: Number of known tokens when the draft model proposed `proposed`.
    num_known: int
    proposed: list[int]
    tally: AcceptanceTally
    forced_tally: AcceptanceTally
    awaited_guess: int | None
    is_forced: bool


class StageSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of a request's `StageTimer`."""

    stage: RequestStage | None
    since: float
    spent: dict[str, float]
    has_token: bool


class RequestSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of a `Request`. Its fields have the same meaning, except for those with a comment.

    Fields that are used only in a cluster are left out, because an engine of a cluster has no
    journal.
    """

    client: bytes
    number: int
    order: int
    namespace: str
    #: The tokens as little-endian int32.
    tokens: bytes
    prompt_tokens: int
    params: SamplingParams
    seed: int
    max_total_tokens: int
    stop_ids: frozenset[int]
    phase: RequestPhase
    queue_time: float
    arrived_at: float
    start_deadline: float
    deadline: float
    priority_credit: float
    #: Index in `EngineSnapshot.usages`.
    account_usage: int
    #: Index in `EngineSnapshot.adapters`; None: no adapter.
    adapter: int | None
    slot: int | None
    slot_generation: int
    blocks: list[int]
    window_tables: list[list[int]] = []
    num_passed: int
    num_passed_sent: int
    hashes: list[bytes]
    num_computed: int
    num_charged: int
    num_scheduled: int
    num_pending: int
    num_in_flight: int
    uses_draft_model: bool
    num_draft_computed: int
    num_published: int
    num_cached: int
    num_fetched: int
    num_preemptions: int
    prompt_logprobs: list[TokenLogprobs]
    grammar: bytes | None
    #: Whether the request has a matcher. If so, the matcher has consumed all tokens of the answer.
    has_matcher: bool
    labels: tuple[str, ...]
    account: Account | None
    drafting: DraftingSnapshot | None
    num_drafts: int
    num_accepted: int
    encode: EncodeProgress | None
    stage_timer: StageSnapshot


class StepSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of an `InflightStep`."""

    #: The frames of the StepPlan.
    plan: list[bytes]
    #: (index of the request, number of positions) of each row.
    rows: list[tuple[int, int]]
    needs_masks: bool
    num_requested_drafts: int


class EncodeStepSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of an `EncodeStep`."""

    #: The frames of the EncodePlan.
    plan: list[bytes]
    #: (index of the request, number of inputs) of each part.
    parts: list[tuple[int, int]]


class EncodingSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of the `EncodeScheduler`.

    Requests are given by their indexes in `EngineSnapshot.requests`.
    """

    #: Account by account, each account's requests by rank.
    waiting: list[int]
    started: list[int]
    #: Steps in flight, oldest first.
    inflight: list[EncodeStepSnapshot]
    num_open: int
    is_next: bool
    continues: bool


class AdmissionSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of the `Admission` and its grammars."""

    is_draining: bool
    num_accepted: int
    num_refused: int
    order: int
    #: Compile jobs that the loop has not fetched yet.
    jobs: list[CompileJob]
    #: Digests of the compiled grammars, least recently used first.
    templates: list[bytes]
    #: Digest of a grammar being compiled -> indexes of the requests that wait for it.
    waiters: dict[bytes, list[int]]


class FairShareSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of the `FairShare`.

    Accounts are given by their indexes in `EngineSnapshot.usages`.
    """

    level: float
    last: int | None
    last_at: float
    other_at: float
    known: list[int]


class SchedulerSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of the `Scheduler` and its slots.

    Requests are given by their indexes in `EngineSnapshot.requests`.
    """

    running: list[int]
    unbound: list[int]
    #: Account by account, each account's requests by rank.
    waiting: list[int]
    blocked_newcomer: int | None
    has_paused_decodes: bool
    num_prefill_tokens: int
    free_slots: list[int]
    slot_generations: list[int]
    slot_releases: list[SlotRelease]


class BlockSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of the `BlockPool` and its `PrefixCache`."""

    holders: list[int]
    #: Free blocks in the order in which they will be allocated.
    free: list[int]
    #: Block -> hash of its content.
    cached: dict[int, bytes]
    draft_computed: set[int]


class FetchSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of a `Fetch` that the worker has not reported on."""

    job: int
    request: int
    match: Match
    started_at: float
    state: FetchState


class KVSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of the `Fetches` and the `TierIndex`.

    There are no leases, because an engine of a cluster has no journal.
    """

    fetches: list[FetchSnapshot]
    last_job: int
    num_failed: dict[str, int]
    num_tokens: int
    num_bytes: int
    tiers: dict[str, Tier]
    load_s: float


class SpeculationSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of the `Speculation`."""

    overhead: dict[int, StepTimes]
    model_tally: AcceptanceTally
    num_started: int


class AdapterSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of an `EngineAdapter`. Its fields have the same meaning."""

    name: str
    path: str
    row: int
    generation: int
    state: AdapterState
    digest: str
    rank: int
    num_requests: int
    client: bytes
    request: int


class EngineSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of an `Engine`. The parts refer to requests by their indexes in `requests`."""

    #: The engine's clock.
    now: float
    #: Number of the last plan.
    step: int
    #: Statistics: tokens of each kind, and preemptions.
    counts: dict[str, int]
    #: Finish reason -> number of requests.
    finished: dict[str, int]
    #: "queued" or "running" -> number of missed deadlines.
    timeouts: dict[str, int]
    #: Known tokens of the requests admitted since the last commit.
    num_admitted_tokens: int
    #: Open requests in order of arrival, then ended requests that still own slot and blocks.
    requests: list[RequestSnapshot]
    #: How many of `requests` are open.
    num_open: int
    #: The accounts that other parts refer to.
    usages: list[AccountUsage]
    #: Indexes of the ended requests that are in a step in flight.
    ended_in_flight: list[int]
    #: Steps in flight, oldest first.
    inflight: list[StepSnapshot]
    #: Account -> its token buckets.
    buckets: dict[str, AccountBuckets]
    #: Measured rates.
    throughput: Throughput
    #: Counters, and the grammars that are compiled or being compiled.
    admission: AdmissionSnapshot
    #: The order between accounts.
    fair_share: FairShareSnapshot
    #: Running and waiting requests, and slots.
    scheduler: SchedulerSnapshot
    #: Requests that encode.
    encoding: EncodingSnapshot
    #: Holders of the blocks, and the prefix cache.
    blocks: BlockSnapshot
    #: Fetches, and the contents of the tiers.
    kv: KVSnapshot
    #: Measured overhead and acceptance of drafts.
    speculation: SpeculationSnapshot
    #: The LoRA adapters that own a row of the worker's table.
    adapters: list[AdapterSnapshot]
    #: Generation of each row of that table.
    adapter_generations: list[int]


CONVERTED = {"tokens", "account_usage", "adapter", "has_matcher", "drafting", "stage_timer"}
"""Fields of `RequestSnapshot` whose values are converted. The others are copied."""
ADAPTER_FIELDS = AdapterSnapshot.__struct_fields__
COPIED = [name for name in RequestSnapshot.__struct_fields__ if name not in CONVERTED]


# ---- engine -> snapshot


def take_snapshot(engine: Engine) -> EngineSnapshot:
    """Return a snapshot of the engine, in O(requests + blocks).

    Call it between two turns of the loop. The snapshot shares mutable objects with the engine, so
    it must be encoded before the next call of the engine.
    """
    scheduler, fetches = engine.scheduler, engine.kv_transfers.fetches
    encoded = [request for step in engine.encoding.inflight for request, _ in step.parts]
    held = [*scheduler.running, *scheduler.unbound, *encoded]
    requests = {
        request: i for i, request in enumerate(dict.fromkeys([*engine.open_requests, *held]))
    }
    fair_share = scheduler.fair_share
    known = fair_share._by_name.values()
    last = [] if fair_share._last is None else [fair_share._last]
    used = [*known, *last, *(request.account_usage for request in requests)]
    usages = {usage: i for i, usage in enumerate(dict.fromkeys(used))}
    adapters = {adapter: i for i, adapter in enumerate(engine.adapters._adapters)}
    return EngineSnapshot(
        now=engine._clock.now,
        step=engine._step,
        counts=engine._counts,
        finished=engine._finished,
        timeouts=engine._timeouts,
        num_admitted_tokens=engine._num_admitted_tokens,
        requests=[_from_request(request, usages, adapters) for request in requests],
        num_open=len(engine.open_requests),
        usages=list(usages),
        ended_in_flight=[requests[request] for request in engine._ended_in_flight],
        inflight=[_from_step(step, requests) for step in engine._inflight],
        buckets=engine._accounts._buckets,
        throughput=engine.throughput,
        admission=_from_admission(engine.admission, requests),
        fair_share=FairShareSnapshot(
            level=fair_share._level,
            last=None if fair_share._last is None else usages[fair_share._last],
            last_at=fair_share._last_at,
            other_at=fair_share._other_at,
            known=[usages[usage] for usage in known],
        ),
        scheduler=_from_scheduler(scheduler, requests),
        encoding=_from_encoding(engine.encoding, requests),
        blocks=_from_pool(scheduler.pool),
        kv=KVSnapshot(
            fetches=[_from_fetch(fetch, requests) for fetch in fetches._jobs.values()],
            last_job=fetches._last_job,
            num_failed=fetches.num_failed,
            num_tokens=fetches.num_tokens,
            num_bytes=fetches.num_bytes,
            tiers=engine.kv_transfers.tiers._tiers,
            load_s=engine.kv_transfers.tiers._load_s,
        ),
        speculation=SpeculationSnapshot(
            overhead=engine._speculation.overhead._times,
            model_tally=engine._speculation._model_tally,
            num_started=engine._speculation._num_started,
        ),
        adapters=[
            AdapterSnapshot(**{name: getattr(adapter, name) for name in ADAPTER_FIELDS})
            for adapter in adapters
        ],
        adapter_generations=engine.adapters._generations,
    )


def _from_request(
    request: Request, usages: dict[AccountUsage, int], adapters: dict[EngineAdapter, int]
) -> RequestSnapshot:
    timer = request.stage_timer
    return RequestSnapshot(
        **{name: getattr(request, name) for name in COPIED},
        tokens=request.tokens.tobytes(),
        account_usage=usages[request.account_usage],
        adapter=None if request.adapter is None else adapters[request.adapter],
        has_matcher=request.matcher is not None,
        drafting=None if request.drafting is None else _from_drafting(request.drafting),
        stage_timer=StageSnapshot(
            stage=timer._stage,
            since=timer._since,
            spent=timer._spent,
            has_token=timer._has_token,
        ),
    )


def _from_drafting(drafting: RequestDrafting) -> DraftingSnapshot:
    drafter = drafting.drafter
    by_model = drafter if isinstance(drafter, ModelDrafter) else ModelDrafter()
    return DraftingSnapshot(
        num_indexed=drafter.num_indexed if isinstance(drafter, NgramDrafter) else None,
        num_known=by_model._num_known,
        proposed=by_model._proposed,
        tally=drafting.tally,
        forced_tally=drafting.forced_tally,
        awaited_guess=drafting.awaited_guess,
        is_forced=drafting.is_forced,
    )


def _from_step(step: InflightStep, requests: dict[Request, int]) -> StepSnapshot:
    return StepSnapshot(
        plan=[bytes(frame) for frame in wire.encode(step.plan)],
        rows=[
            (requests[request], count)
            for request, count in zip(step.requests, step.counts, strict=True)
        ],
        needs_masks=step.needs_masks,
        num_requested_drafts=step.num_requested_drafts,
    )


def _from_admission(admission: Admission, requests: dict[Request, int]) -> AdmissionSnapshot:
    waiters = admission._grammars._waiters.items()
    return AdmissionSnapshot(
        is_draining=admission.is_draining,
        num_accepted=admission.num_accepted,
        num_refused=admission.num_refused,
        order=admission._order,
        jobs=admission._grammars.jobs,
        templates=list(admission.templates),
        waiters={digest: [requests[request] for request in waiting] for digest, waiting in waiters},
    )


def _from_scheduler(scheduler: Scheduler, requests: dict[Request, int]) -> SchedulerSnapshot:
    newcomer = scheduler._blocked_newcomer
    if newcomer is not None and newcomer not in scheduler.waiting:
        newcomer = None  # it does not wait any more, so the scheduler would ignore it
    return SchedulerSnapshot(
        running=[requests[request] for request in scheduler.running],
        unbound=[requests[request] for request in scheduler.unbound],
        waiting=[requests[request] for request in scheduler.waiting.requests()],
        blocked_newcomer=None if newcomer is None else requests[newcomer],
        has_paused_decodes=scheduler._has_paused_decodes,
        num_prefill_tokens=scheduler.num_prefill_tokens,
        free_slots=scheduler.slots._free,
        slot_generations=scheduler.slots._generations,
        slot_releases=scheduler.slots._releases,
    )


def _from_encoding(encoding: EncodeScheduler, requests: dict[Request, int]) -> EncodingSnapshot:
    return EncodingSnapshot(
        waiting=[requests[request] for request in encoding.waiting.requests()],
        started=[requests[request] for request in encoding.started],
        inflight=[
            EncodeStepSnapshot(
                plan=[bytes(frame) for frame in wire.encode(step.plan)],
                parts=[(requests[request], count) for request, count in step.parts],
            )
            for step in encoding.inflight
        ],
        num_open=encoding.num_open,
        is_next=encoding.is_next,
        continues=encoding.continues,
    )


def _from_pool(pool: BlockPool) -> BlockSnapshot:
    return BlockSnapshot(
        holders=pool.holders,
        free=list(pool._free),
        cached=pool.cache._hash_of,
        draft_computed=pool.cache._draft_computed,
    )


def _from_fetch(fetch: Fetch, requests: dict[Request, int]) -> FetchSnapshot:
    return FetchSnapshot(
        job=fetch.job,
        request=requests[fetch.request],
        match=fetch.match,
        started_at=fetch.started_at,
        state=fetch.state,
    )


# ---- snapshot -> engine


def restore_snapshot(engine: Engine, snapshot: EngineSnapshot, find: FindTemplate) -> None:
    """Restore the state of the snapshot in a new engine.

    The engine takes over the mutable objects of the snapshot, so the snapshot must not be used
    again. `find` returns compiled grammars. Raises LookupError, ValueError or WireError if the
    snapshot is damaged.
    """
    engine._clock.now = engine._accounts.now = engine.kv_transfers._now = snapshot.now
    engine._step = snapshot.step
    engine._counts = Counter(snapshot.counts)
    engine._finished = Counter(snapshot.finished)
    engine._timeouts = Counter(snapshot.timeouts)
    engine._num_admitted_tokens = snapshot.num_admitted_tokens
    engine._accounts._buckets = snapshot.buckets
    for field in fields(Throughput):  # copied, because several parts share the engine's object
        setattr(engine.throughput, field.name, getattr(snapshot.throughput, field.name))
    speculation = engine._speculation
    speculation.overhead._times = snapshot.speculation.overhead
    speculation._model_tally = snapshot.speculation.model_tally
    speculation._num_started = snapshot.speculation.num_started
    engine.adapters._adapters = [
        EngineAdapter(**{name: getattr(part, name) for name in ADAPTER_FIELDS})
        for part in snapshot.adapters
    ]
    engine.adapters._generations = snapshot.adapter_generations
    requests = [_to_request(each, engine, snapshot.usages, find) for each in snapshot.requests]
    for request in requests[: snapshot.num_open]:
        engine.open_requests.add(request)
        engine._deadlines.add(request)
    engine._ended_in_flight = [requests[i] for i in snapshot.ended_in_flight]
    engine._inflight.restore(_to_step(step, requests) for step in snapshot.inflight)
    _restore_fair_share(engine.scheduler.fair_share, snapshot.fair_share, snapshot.usages)
    _restore_admission(engine.admission, snapshot.admission, requests, find)
    _restore_scheduler(engine.scheduler, snapshot.scheduler, requests)
    _restore_encoding(engine.encoding, snapshot.encoding, requests)
    _restore_pool(engine.scheduler.pool, snapshot.blocks)
    _restore_kv(engine.kv_transfers, snapshot.kv, requests)


def _to_request(
    part: RequestSnapshot, engine: Engine, usages: list[AccountUsage], find: FindTemplate
) -> Request:
    tokens = array("i", part.tokens)
    timer = StageTimer(engine._clock)
    timer._stage, timer._since = part.stage_timer.stage, part.stage_timer.since
    timer._spent, timer._has_token = part.stage_timer.spent, part.stage_timer.has_token
    request = Request(
        **{name: getattr(part, name) for name in COPIED},
        tokens=tokens,
        account_usage=usages[part.account_usage],
        adapter=None if part.adapter is None else engine.adapters._adapters[part.adapter],
        stage_timer=timer,
    )
    if part.has_matcher and part.grammar is not None:
        request.matcher = _matcher(find(part.grammar), tokens[part.prompt_tokens :])
    if part.drafting is not None:
        request.drafting = _to_drafting(part.drafting, tokens, engine._speculation)
    return request


def _matcher(template: MatcherTemplate, answer: Iterable[int]) -> Matcher:
    """Return the grammar's matcher after all tokens of the answer."""
    matcher = template.start()
    for token in answer:
        matcher.consume(token)
    return matcher


def _to_drafting(
    part: DraftingSnapshot, tokens: array[int], speculation: Speculation
) -> RequestDrafting:
    drafting = speculation.new_drafting(part.tally)
    drafting.forced_tally = part.forced_tally
    drafting.awaited_guess, drafting.is_forced = part.awaited_guess, part.is_forced
    if isinstance(drafting.drafter, NgramDrafter):
        drafting.drafter.index_first(tokens, part.num_indexed or 0)
    else:
        drafting.on_proposed(part.num_known, part.proposed)
    return drafting


def _to_step(part: StepSnapshot, requests: list[Request]) -> InflightStep:
    return InflightStep(
        plan=_PLAN.decode(part.plan),
        requests=[requests[i] for i, _ in part.rows],
        needs_masks=part.needs_masks,
        num_requested_drafts=part.num_requested_drafts,
    )


def _restore_fair_share(
    fair_share: FairShare, part: FairShareSnapshot, usages: list[AccountUsage]
) -> None:
    fair_share._level = part.level
    fair_share._last = None if part.last is None else usages[part.last]
    fair_share._last_at, fair_share._other_at = part.last_at, part.other_at
    fair_share._by_name = {usages[i].name: usages[i] for i in part.known}


def _restore_admission(
    admission: Admission, part: AdmissionSnapshot, requests: list[Request], find: FindTemplate
) -> None:
    admission.is_draining = part.is_draining
    admission.num_accepted, admission.num_refused = part.num_accepted, part.num_refused
    admission._order = part.order
    grammars = admission._grammars
    grammars.jobs = part.jobs
    grammars._templates.update((digest, find(digest)) for digest in part.templates)
    grammars._waiters = {
        digest: [requests[i] for i in waiting] for digest, waiting in part.waiters.items()
    }


def _restore_scheduler(
    scheduler: Scheduler, part: SchedulerSnapshot, requests: list[Request]
) -> None:
    scheduler.running = [requests[i] for i in part.running]
    scheduler.unbound = [requests[i] for i in part.unbound]
    scheduler.waiting.restore(requests[i] for i in part.waiting)
    newcomer = part.blocked_newcomer
    scheduler._blocked_newcomer = None if newcomer is None else requests[newcomer]
    scheduler._has_paused_decodes = part.has_paused_decodes
    scheduler.num_prefill_tokens = part.num_prefill_tokens
    scheduler.slots._free = part.free_slots
    scheduler.slots._generations = part.slot_generations
    scheduler.slots._releases = part.slot_releases


def _restore_encoding(
    encoding: EncodeScheduler, part: EncodingSnapshot, requests: list[Request]
) -> None:
    encoding.waiting.restore(requests[i] for i in part.waiting)
    encoding.started = [requests[i] for i in part.started]
    encoding.inflight.extend(
        EncodeStep(_ENCODE_PLAN.decode(step.plan), [(requests[i], n) for i, n in step.parts])
        for step in part.inflight
    )
    encoding.is_next, encoding.continues = part.is_next, part.continues
    encoding.num_open = part.num_open


def _restore_pool(pool: BlockPool, part: BlockSnapshot) -> None:
    pool.holders = part.holders
    pool._free.clear()
    pool._free.update(dict.fromkeys(part.free))
    for block, content in part.cached.items():
        is_draft_computed = block in part.draft_computed
        pool.cache.publish(content, block, is_draft_computed=is_draft_computed)
    pool.num_cached = sum(block in pool.cache for block in part.free)


def _restore_kv(kv_transfers: KVTransfers, part: KVSnapshot, requests: list[Request]) -> None:
    fetches, tiers = kv_transfers.fetches, kv_transfers.tiers
    fetches._jobs = {
        each.job: Fetch(each.job, requests[each.request], each.match, each.started_at, each.state)
        for each in part.fetches
    }
    fetches._jobs_by_request = {fetch.request: fetch.job for fetch in fetches._jobs.values()}
    fetches._last_job = part.last_job
    fetches.num_failed = Counter(part.num_failed)
    fetches.num_tokens, fetches.num_bytes = part.num_tokens, part.num_bytes
    tiers._tiers, tiers._load_s = part.tiers, part.load_s
