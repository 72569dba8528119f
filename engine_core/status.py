"""What an engine reports about itself: its load, its statistics, and its open requests.

These functions only read. Nothing that the engine decides depends on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice

from msgspec.structs import replace

from engine_core.parts import EngineParts
from engine_core.policy.throughput import Throughput
from engine_core.requests.open_requests import OpenRequests
from engine_core.schedule.commit import status_row
from engine_core.schedule.inflight import InflightSteps
from protocol.engine.messages import EngineStatus, GetStatus, RequestStatus
from protocol.engine.stats import BlockCounts, EngineLoad, EngineStats, WorkerStatus
from protocol.engine.timeline import Lack

MAX_STATUS_ROWS = 10_000
"""Maximum number of request rows in one EngineStatus."""


def status_rows(
    open_requests: OpenRequests, lack: Lack, max_rows: int
) -> list[tuple[bytes, RequestStatus]]:
    """Return (client, row) of the `max_rows` oldest requests, at most MAX_STATUS_ROWS.

    `lack` is what the first request in the queue lacks.
    """
    oldest = islice(open_requests, min(max(max_rows, 0), MAX_STATUS_ROWS))
    return [(request.client, status_row(request, lack)) for request in oldest]


def block_counts(parts: EngineParts) -> BlockCounts:
    pool, leased = parts.scheduler.pool, parts.kv_transfers.leases.num_blocks
    return BlockCounts(
        requests=pool.total - pool.num_free - leased,
        leased=leased,
        cached=pool.num_cached,
        free=pool.num_free - pool.num_cached,
    )


def state_bytes(parts: EngineParts) -> dict[str, int]:
    """Return the bytes of recurrent states in use, by where they are; empty if the model has no
    recurrent layers."""
    scheduler, size = parts.scheduler, parts.limits.state_bytes
    if not size:
        return {}
    checkpoints = scheduler.pool.cache.checkpoints
    used = 0 if checkpoints is None else checkpoints.num_held + checkpoints.num_cached
    running = len(scheduler.running) + len(scheduler.unbound)
    return {"slots": running * size, "checkpoints": used * size}


def worker_status(inflight: InflightSteps, throughput: Throughput) -> WorkerStatus:
    """Describe the step that the worker computes, which is the oldest plan in flight. The caller
    adds the measured times."""
    step = inflight.oldest
    if step is None:
        return WorkerStatus()
    rate = throughput.tokens_per_s
    return WorkerStatus(
        step=step.plan.step,
        expected_s=step.num_tokens / rate if rate else 0.0,
        prompt_tokens=sum(request.prompt_tokens for request in step.prompts),
        computed_tokens=sum(request.num_computed for request in step.prompts),
    )


def engine_load(parts: EngineParts) -> EngineLoad:
    """Return how busy the engine is. It takes constant time, because it is sent after each step."""
    scheduler, encoding = parts.scheduler, parts.encoding
    num_started, tokens = 0, scheduler.waiting.tokens + scheduler.num_prefill_tokens
    if encoding.num_open:
        num_started = encoding.num_started
        tokens += encoding.waiting_load.tokens + encoding.num_started_tokens
    return EngineLoad(
        running=len(scheduler.running) + len(scheduler.unbound) + num_started,
        waiting=parts.admission.num_waiting,
        queued_tokens=tokens,
    )


def engine_stats(parts: EngineParts, *, clients: int, wire_errors: int) -> EngineStats:
    """Return the statistics, with those of the event loop: its clients, and malformed messages."""
    scheduler, leases = parts.scheduler, parts.kv_transfers.leases
    fetches, tiers = parts.kv_transfers.fetches, parts.kv_transfers.tiers
    counts, checkpoints = parts.totals.counts, scheduler.pool.cache.checkpoints
    limits, images = parts.limits, parts.images
    by_adapter = [(r.adapter.name, r.slot is None) for r in parts.open_requests if r.adapter]
    return EngineStats(
        draining=parts.admission.is_draining,
        running=sum(request.slot is not None for request in parts.open_requests)
        + parts.encoding.num_started,
        waiting=parts.admission.num_waiting,
        waiting_tokens=scheduler.waiting.tokens + parts.encoding.waiting_load.tokens,
        free_blocks=scheduler.pool.num_free,
        total_blocks=scheduler.pool.total,
        total_checkpoints=0 if checkpoints is None else checkpoints.total,
        cached_checkpoints=0 if checkpoints is None else checkpoints.num_cached,
        held_checkpoints=0 if checkpoints is None else checkpoints.num_held,
        state_bytes=state_bytes(parts),
        reserved_state_bytes=limits.state_bytes * (limits.max_slots + limits.num_checkpoints),
        clients=clients,
        fetching=len(fetches),
        leases=len(leases),
        leased_blocks=leases.num_blocks,
        kv_dtype=parts.config.worker.kv_dtype,
        max_adapters=limits.max_adapters,
        num_adapter_requests=parts.adapters.num_requests,
        adapters_running=Counter(name for name, is_waiting in by_adapter if not is_waiting),
        adapters_waiting=Counter(name for name, is_waiting in by_adapter if is_waiting),
        num_steps=parts.totals.step,
        num_accepted=parts.admission.num_accepted,
        num_refused=parts.admission.num_refused,
        num_finished=dict(parts.totals.finished),
        num_prompt_tokens=counts["prompt_tokens"],
        num_cached_tokens=counts["cached_tokens"],
        num_uncovered_tokens=counts["uncovered_tokens"],
        num_evicted_checkpoints={} if checkpoints is None else dict(checkpoints.num_evicted),
        num_computed_tokens=counts["computed_tokens"],
        num_fetched_tokens=fetches.num_tokens,
        num_fetched_bytes=fetches.num_bytes,
        num_fetches_failed=dict(fetches.num_failed),
        num_timeouts=dict(parts.totals.timeouts),
        num_leases_ended=dict(leases.num_ended),
        tier_blocks=tiers.by_tier(lambda tier: tier.num_blocks),
        tier_bytes=tiers.by_tier(lambda tier: tier.num_bytes),
        num_tier_stored=tiers.by_tier(lambda tier: tier.num_stored),
        num_tier_dropped=tiers.by_tier(lambda tier: tier.num_dropped),
        num_tier_loaded=tiers.by_tier(lambda tier: tier.num_loaded),
        num_tier_failed=tiers.by_tier(lambda tier: tier.num_failed),
        num_generated_tokens=counts["generated_tokens"],
        num_preemptions=counts["preemptions"],
        num_draft_tokens=counts["draft_tokens"],
        num_accepted_tokens=counts["accepted_tokens"],
        image_tokens=images.num_kept_rows,
        image_bytes=images.content.num_bytes,
        num_images_encoded=images.num_encoded,
        num_image_tokens_encoded=images.num_encoded_rows,
        num_image_hits=images.num_hits,
        image_encode_s=images.encode_s,
        num_wire_errors=wire_errors,
        busy_s=parts.throughput.busy_s,
    )


def engine_status(
    parts: EngineParts,
    message: GetStatus,
    *,
    now: float,
    stats: EngineStats,
    client_name: Callable[[bytes], str],
) -> EngineStatus:
    """Return the answer to a GetStatus. `client_name` returns the name of a client."""
    after, history = message.after_step, parts.history
    rows = status_rows(parts.open_requests, parts.scheduler.lack, message.max_rows)
    return EngineStatus(
        request=message.request,
        now_s=now,
        stats=stats,
        num_open=len(parts.open_requests),
        rows=[replace(row, client=client_name(owner)) for owner, row in rows],
        blocks=block_counts(parts),
        steps=[] if after is None else history.steps.after(after),
        first_tokens=history.first_tokens,
        gaps=history.gaps,
    )
