"""Restores an engine from a snapshot.

Data that the snapshot does not store are computed again: a matcher consumes the tokens of its
answer, and an n-gram index is built.

`capture` is the opposite. It must be changed together with this module.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import fields

from engine_core.admission.admission import Admission
from engine_core.admission.grammar_cache import CachedGrammar, PendingGrammar
from engine_core.blocks.pool import BlockPool
from engine_core.encode.scheduler import EncodeScheduler, EncodeStep
from engine_core.engine import Engine
from engine_core.grammar.matcher import Matcher, MatcherTemplate
from engine_core.images.rows import ImageRows
from engine_core.journal.snapshot import (
    ADAPTER_FIELDS,
    COPIED,
    AdmissionSnapshot,
    BlockSnapshot,
    DraftingSnapshot,
    EncodingSnapshot,
    EngineSnapshot,
    FairShareSnapshot,
    ImagesSnapshot,
    KVSnapshot,
    RequestSnapshot,
    SchedulerSnapshot,
    StepSnapshot,
)
from engine_core.kv.fetches import Fetch
from engine_core.kv.transfers import KVTransfers
from engine_core.policy.fair_share import FairShare
from engine_core.policy.queue import WaitingQueue
from engine_core.policy.throughput import Throughput
from engine_core.requests.adapter import EngineAdapter
from engine_core.requests.drafting import RequestDrafting
from engine_core.requests.request import AccountUsage, Request
from engine_core.requests.stage_timer import StageTimer
from engine_core.schedule.inflight import InflightStep
from engine_core.schedule.scheduler import Scheduler
from engine_core.speculation.draft_policy import Speculation
from engine_core.speculation.ngram import NgramDrafter
from protocol.wire import codec
from protocol.worker.steps import EncodePlan, StepPlan

FindTemplate = Callable[[bytes], MatcherTemplate]
"""A function that returns the compiled grammar for a digest."""
_PLAN: codec.Decoder[StepPlan] = codec.Decoder(StepPlan)
_ENCODE_PLAN: codec.Decoder[EncodePlan] = codec.Decoder(EncodePlan)


def restore_snapshot(engine: Engine, snapshot: EngineSnapshot, find: FindTemplate) -> None:
    """Restore the state of the snapshot in a new engine.

    The engine takes over the mutable objects of the snapshot, so the snapshot must not be used
    again. `find` returns compiled grammars. Raises LookupError, ValueError or WireError if the
    snapshot is damaged.
    """
    engine.clock.now = engine.accounts.now = engine.kv_transfers._now = snapshot.now
    engine.totals.step = snapshot.step
    engine.totals.counts = Counter(snapshot.counts)
    engine.totals.finished = Counter(snapshot.finished)
    engine.totals.timeouts = Counter(snapshot.timeouts)
    engine.totals.num_admitted_tokens = snapshot.num_admitted_tokens
    engine.accounts._buckets = snapshot.buckets
    for field in fields(Throughput):  # copied, because several parts share the engine's object
        setattr(engine.throughput, field.name, getattr(snapshot.throughput, field.name))
    speculation = engine.speculation
    speculation.overhead._times = snapshot.speculation.overhead
    speculation._model_tally = snapshot.speculation.model_tally
    speculation._num_started = snapshot.speculation.num_started
    engine.adapters._adapters = [
        EngineAdapter(**{name: getattr(part, name) for name in ADAPTER_FIELDS})
        for part in snapshot.adapters
    ]
    engine.adapters._generations = snapshot.adapter_generations
    requests = [_to_request(each, engine, snapshot.usages, find) for each in snapshot.requests]
    _restore_images(engine.images, snapshot.images)
    for request in requests:
        engine.adapters.add_user(request)
        engine.images.content.add_user(request)
    for request in requests[: snapshot.num_open]:
        engine.open_requests.add(request)
        engine.deadlines.add(request)
    engine.endings.in_flight = [requests[i] for i in snapshot.ended_in_flight]
    engine.inflight.restore(_to_step(step, requests) for step in snapshot.inflight)
    _restore_fair_share(engine.scheduler.fair_share, snapshot.fair_share, snapshot.usages)
    num_open = snapshot.num_open
    _restore_admission(engine.admission, snapshot.admission, requests, num_open, find)
    _restore_scheduler(engine.scheduler, snapshot.scheduler, requests)
    _restore_encoding(engine.encoding, snapshot.encoding, requests)
    _restore_pool(engine.scheduler.pool, snapshot.blocks, requests)
    _restore_kv(engine.kv_transfers, snapshot.kv, requests)


def _to_request(
    part: RequestSnapshot, engine: Engine, usages: list[AccountUsage], find: FindTemplate
) -> Request:
    tokens = array("i", part.tokens)
    timer = StageTimer(engine.clock)
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
        request.drafting = _to_drafting(part.drafting, tokens, engine.speculation)
    return request


def _restore_images(images: ImageRows, part: ImagesSnapshot) -> None:
    for digest, (num_bytes, num_rows) in part.held.items():
        images.content.add(digest, [], num_bytes)
        images.content.held[digest].num_rows = num_rows
    images.content.rejected = dict.fromkeys(part.rejected)
    images.kept, images.encoding = part.kept, part.encoding
    images.num_encoded, images.num_encoded_rows = part.num_encoded, part.num_encoded_rows
    images.num_hits, images.encode_s = part.num_hits, part.encode_s


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
    admission: Admission,
    part: AdmissionSnapshot,
    requests: list[Request],
    num_open: int,
    find: FindTemplate,
) -> None:
    admission.is_draining = part.is_draining
    admission.num_accepted, admission.num_refused = part.num_accepted, part.num_refused
    admission._order = part.order
    grammars = admission._grammars
    grammars.jobs = part.jobs
    users = Counter(request.grammar for request in requests[:num_open] if request.matcher)
    for each in part.cached:
        grammars._cached[each.digest] = CachedGrammar(
            find(each.digest), each.num_bytes, users[each.digest], each.has_failed
        )
    grammars._pending = {
        digest: PendingGrammar(
            pending.num_chars, set(pending.accounts), [requests[i] for i in pending.requests]
        )
        for digest, pending in part.pending.items()
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
    for client, held in part.held.items():
        encoding.held[client] = WaitingQueue(encoding._fair_share)
        encoding.held[client].restore(requests[i] for i in held)
    encoding.started = [requests[i] for i in part.started]
    for i in part.unsent:
        encoding.unsent.add(requests[i])
    encoding.inflight.extend(
        EncodeStep(_ENCODE_PLAN.decode(step.plan), [(requests[i], n) for i, n in step.parts])
        for step in part.inflight
    )
    encoding.debt, encoding.continues = part.debt, part.continues
    encoding.num_open = part.num_open


def _restore_pool(pool: BlockPool, part: BlockSnapshot, requests: list[Request]) -> None:
    pool.holders = part.holders
    pool._free.clear()
    pool._free.update(dict.fromkeys(part.free))
    pool._passed.update(dict.fromkeys(part.passed))
    pool._proven = part.proven
    for block, content in part.cached.items():
        is_draft_computed = block in part.draft_computed
        pool.cache.publish(content, block, is_draft_computed=is_draft_computed)
    pool.num_cached = sum(block in pool.cache for block in (*part.free, *part.passed))
    if part.checkpoints is not None:
        checkpoints = pool.cache.checkpoints
        assert checkpoints is not None
        checkpoints._free = part.checkpoints.free
        checkpoints._cached = OrderedDict(part.checkpoints.cached)
        checkpoints.num_evicted = part.checkpoints.num_evicted
        checkpoints._cached_ids = set(checkpoints._cached.values())
        checkpoints._holders = Counter(
            number for request in requests for number in request.held_checkpoints
        )


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
