"""Takes a snapshot of an engine: copies its state to plain data.

`restore` is the opposite. It must be changed together with this module.
"""

from __future__ import annotations

from engine_core.admission.admission import Admission
from engine_core.blocks.pool import BlockPool
from engine_core.encode.scheduler import EncodeScheduler
from engine_core.engine import Engine
from engine_core.images.rows import ImageRows
from engine_core.journal.snapshot import (
    ADAPTER_FIELDS,
    COPIED,
    AdapterSnapshot,
    AdmissionSnapshot,
    BlockSnapshot,
    CachedGrammarSnapshot,
    CheckpointSnapshot,
    DraftingSnapshot,
    EncodeStepSnapshot,
    EncodingSnapshot,
    EngineSnapshot,
    FairShareSnapshot,
    FetchSnapshot,
    ImagesSnapshot,
    KVSnapshot,
    PendingGrammarSnapshot,
    RequestSnapshot,
    SchedulerSnapshot,
    SpeculationSnapshot,
    StageSnapshot,
    StepSnapshot,
)
from engine_core.kv.fetches import Fetch
from engine_core.kv.transfers import KVTransfers
from engine_core.policy.fair_share import FairShare
from engine_core.requests.adapter import EngineAdapter
from engine_core.requests.drafting import ModelDrafter, RequestDrafting
from engine_core.requests.request import AccountUsage, Request
from engine_core.schedule.inflight import InflightStep
from engine_core.schedule.scheduler import Scheduler
from engine_core.speculation.ngram import NgramDrafter
from protocol.wire import codec


def take_snapshot(engine: Engine) -> EngineSnapshot:
    """Return a snapshot of the engine, in O(requests + blocks).

    Call it between two turns of the loop. The snapshot shares mutable objects with the engine, so
    it must be encoded before the next call of the engine.
    """
    scheduler, fair_share = engine.scheduler, engine.scheduler.fair_share
    encoded = [request for step in engine.encoding.inflight for request, _ in step.parts]
    held = [*scheduler.running, *scheduler.unbound, *encoded]
    requests = {
        request: i for i, request in enumerate(dict.fromkeys([*engine.open_requests, *held]))
    }
    last = [] if fair_share._last is None else [fair_share._last]
    used = [*fair_share._by_name.values(), *last, *(request.account_usage for request in requests)]
    usages = {usage: i for i, usage in enumerate(dict.fromkeys(used))}
    adapters = {adapter: i for i, adapter in enumerate(engine.adapters._adapters)}
    return EngineSnapshot(
        now=engine.clock.now,
        step=engine.totals.step,
        counts=engine.totals.counts,
        finished=engine.totals.finished,
        timeouts=engine.totals.timeouts,
        num_admitted_tokens=engine.totals.num_admitted_tokens,
        requests=[_from_request(request, usages, adapters) for request in requests],
        num_open=len(engine.open_requests),
        usages=list(usages),
        ended_in_flight=[requests[request] for request in engine.endings.in_flight],
        inflight=[_from_step(step, requests) for step in engine.inflight],
        buckets=engine.accounts._buckets,
        throughput=engine.throughput,
        admission=_from_admission(engine.admission, requests),
        fair_share=_from_fair_share(fair_share, usages),
        scheduler=_from_scheduler(scheduler, requests),
        encoding=_from_encoding(engine.encoding, requests),
        blocks=_from_pool(scheduler.pool),
        kv=_from_kv(engine.kv_transfers, requests),
        speculation=SpeculationSnapshot(
            overhead=engine.speculation.overhead._times,
            model_tally=engine.speculation._model_tally,
            num_started=engine.speculation._num_started,
        ),
        images=_from_images(engine.images),
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


def _from_images(images: ImageRows) -> ImagesSnapshot:
    content = images.content
    return ImagesSnapshot(
        held={digest: (each.num_bytes, each.num_rows) for digest, each in content.held.items()},
        rejected=list(content.rejected),
        kept=images.kept,
        encoding=images.encoding,
        num_encoded=images.num_encoded,
        num_encoded_rows=images.num_encoded_rows,
        num_hits=images.num_hits,
        encode_s=images.encode_s,
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
        plan=[bytes(frame) for frame in codec.encode(step.plan)],
        rows=[
            (requests[request], count)
            for request, count in zip(step.requests, step.counts, strict=True)
        ],
        needs_masks=step.needs_masks,
        num_requested_drafts=step.num_requested_drafts,
    )


def _from_admission(admission: Admission, requests: dict[Request, int]) -> AdmissionSnapshot:
    return AdmissionSnapshot(
        is_draining=admission.is_draining,
        num_accepted=admission.num_accepted,
        num_refused=admission.num_refused,
        order=admission._order,
        jobs=admission._grammars.jobs,
        cached=[
            CachedGrammarSnapshot(
                digest=digest, num_bytes=cached.num_bytes, has_failed=cached.has_failed
            )
            for digest, cached in admission.cached_grammars.items()
        ],
        pending={
            digest: PendingGrammarSnapshot(
                num_chars=pending.num_chars,
                accounts=sorted(pending.accounts),
                requests=[requests[request] for request in pending.requests],
            )
            for digest, pending in admission._grammars._pending.items()
        },
    )


def _from_fair_share(fair_share: FairShare, usages: dict[AccountUsage, int]) -> FairShareSnapshot:
    return FairShareSnapshot(
        level=fair_share._level,
        last=None if fair_share._last is None else usages[fair_share._last],
        last_at=fair_share._last_at,
        other_at=fair_share._other_at,
        known=[usages[usage] for usage in fair_share._by_name.values()],
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
        held={
            client: [requests[request] for request in queue.requests()]
            for client, queue in encoding.held.items()
        },
        started=[requests[request] for request in encoding.started],
        unsent=[requests[request] for request in encoding.unsent],
        inflight=[
            EncodeStepSnapshot(
                plan=[bytes(frame) for frame in codec.encode(step.plan)],
                parts=[(requests[request], count) for request, count in step.parts],
            )
            for step in encoding.inflight
        ],
        num_open=encoding.num_open,
        debt=encoding.debt,
        continues=encoding.continues,
    )


def _from_pool(pool: BlockPool) -> BlockSnapshot:
    checkpoints = pool.cache.checkpoints
    return BlockSnapshot(
        holders=pool.holders,
        free=list(pool._free),
        passed=list(pool._passed),
        proven=pool._proven,
        cached=pool.cache._hash_of,
        draft_computed=pool.cache._draft_computed,
        checkpoints=(
            None
            if checkpoints is None
            else CheckpointSnapshot(
                free=checkpoints._free,
                cached=checkpoints._cached,
                num_evicted=checkpoints.num_evicted,
            )
        ),
    )


def _from_kv(kv_transfers: KVTransfers, requests: dict[Request, int]) -> KVSnapshot:
    fetches, tiers = kv_transfers.fetches, kv_transfers.tiers
    return KVSnapshot(
        fetches=[_from_fetch(fetch, requests) for fetch in fetches._jobs.values()],
        last_job=fetches._last_job,
        num_failed=fetches.num_failed,
        num_tokens=fetches.num_tokens,
        num_bytes=fetches.num_bytes,
        tiers=tiers._tiers,
        load_s=tiers._load_s,
    )


def _from_fetch(fetch: Fetch, requests: dict[Request, int]) -> FetchSnapshot:
    return FetchSnapshot(
        job=fetch.job,
        request=requests[fetch.request],
        match=fetch.match,
        started_at=fetch.started_at,
        state=fetch.state,
    )
