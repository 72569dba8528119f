"""What the engine counts and tells: gauges of now, counters since its start."""

from __future__ import annotations

import msgspec


class WorkerView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the worker does at the moment, as its engine sees it. Seconds of durations.

    step             the oldest that it has not finished; 0: it has nothing to do
    step_s           how long it has been at it
    expected_s       how long it should take at the speed of late; 0: nobody knows yet
    prompt_tokens    of the prompts of which the step computes a chunk
    computed_tokens  of these, before the step
    trouble          why nothing is computed; "": all is well
    """

    engine_pid: int = 0
    pid: int = 0
    step: int = 0
    step_s: float = 0.0
    expected_s: float = 0.0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    trouble: str = ""


class EngineStats(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A snapshot of one engine. Counters (`num_*` below the line) only grow within an epoch."""

    draining: bool = False  # what is new is refused
    worker: WorkerView = WorkerView()
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    clients: int = 0
    fetching: int = 0  # fetches on which the worker has not reported
    leases: int = 0  # what is kept for other engines
    leased_blocks: int = 0
    tier_blocks: dict[str, int] = {}  # by tier (kv.KVTierNews)
    tier_bytes: dict[str, int] = {}
    # ---- counters
    num_steps: int = 0
    num_accepted: int = 0
    num_refused: int = 0
    num_refused_early: int = 0  # by clients, as what the engine had refused stood
    num_finished: dict[str, int] = {}  # by finish reason
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0  # positions, of prompts, answers and drafts
    num_fetched_tokens: int = 0  # of the prompts, whose K/V came from elsewhere
    num_fetched_bytes: int = 0
    num_fetches_failed: dict[str, int] = {}  # by kind (kv.KVFailure)
    num_timeouts: dict[str, int] = {}  # queued: never begun; running
    num_leases_ended: dict[str, int] = {}  # taken, released, expired, yielded
    num_tier_stored: dict[str, int] = {}  # blocks, by tier
    num_tier_dropped: dict[str, int] = {}
    num_tier_loaded: dict[str, int] = {}
    num_tier_failed: dict[str, int] = {}
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of the drafts
    num_wire_errors: int = 0
    busy_s: float = 0.0  # time spent waiting for workers' results
