"""Statistics of one engine: values of its current state, and counters since its start."""

from __future__ import annotations

import msgspec


class WorkerStatus(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The current work of a worker.

    engine_pid       pid of the engine
    pid              pid of the worker
    step             number of the oldest unfinished step; 0: the worker is idle
    step_s           seconds since that step started
    expected_s       seconds that the step should take at recent speed; 0: not known yet
    prompt_tokens    total length of the prompts of which the step computes a chunk
    computed_tokens  tokens of these prompts that were computed before the step
    trouble          why the worker is late, or that it is stopped; "": no problem
    """

    engine_pid: int = 0
    pid: int = 0
    step: int = 0
    step_s: float = 0.0
    expected_s: float = 0.0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    trouble: str = ""


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """How busy an engine is: what a gateway needs to choose between replicas."""

    #: Requests that hold a slot.
    running: int
    waiting: int
    #: Known tokens that will be computed before a new request's: those of the waiting requests, and
    #: the rest of the prompts that are being computed.
    queued_tokens: int


class BlockCounts(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The blocks of the KV cache by owner. The four numbers add up to all blocks."""

    #: Held by requests that have a slot.
    requests: int = 0
    #: Kept for other engines by a lease. A request may hold them, too.
    leased: int = 0
    #: Free, but with content that a request may find in the prefix cache.
    cached: int = 0
    #: Free, without content.
    free: int = 0


class StepSummary(msgspec.Struct, frozen=True, array_like=True):
    """One step, or consecutive steps with the same rows."""

    #: Number of the first step.
    first: int
    #: How many steps.
    count: int
    #: Tokens of all these steps: of prompts, the next ones of answers, and drafts.
    prefill: int
    decode: int
    draft: int
    #: Seconds that the worker needed for all of them, and for the slowest.
    busy_s: float
    longest_s: float
    #: When the last one ended, by the engine's clock (`EngineStatus.now_s`).
    ended_s: float


class EngineStats(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A snapshot of one engine. Counters (`num_*` and `busy_s`) never shrink within an epoch."""

    draining: bool = False  #: new requests are refused
    worker: WorkerStatus = WorkerStatus()
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    total_checkpoints: int = 0  #: checkpoints of recurrent states; 0: the model has none
    cached_checkpoints: int = 0  #: those that a prompt may find
    held_checkpoints: int = 0  #: those of running requests and leases
    #: Bytes of recurrent states in use: those of running requests ("slots"), and of held and cached
    #: checkpoints ("checkpoints"). Empty: the model has none.
    state_bytes: dict[str, int] = {}
    reserved_state_bytes: int = 0  #: of all slots and all checkpoints
    clients: int = 0
    fetching: int = 0  #: K/V fetches in progress
    leases: int = 0  #: leases of K/V that is kept for other engines
    leased_blocks: int = 0
    kv_dtype: str = "auto"  #: number type of the KV cache, as configured (--kv-dtype)
    max_adapters: int = 0  #: most LoRA adapters that can be loaded
    adapters_running: dict[str, int] = {}  #: requests that hold a slot, by LoRA adapter
    adapters_waiting: dict[str, int] = {}  #: waiting requests, by LoRA adapter
    tier_blocks: dict[str, int] = {}  #: number of stored blocks, by tier (kv.KVTierNews)
    tier_bytes: dict[str, int] = {}
    image_tokens: int = 0  #: rows of encoded images that are kept, or being made
    image_bytes: int = 0  #: tensors of images that clients have sent
    # ---- counters
    num_steps: int = 0
    num_accepted: int = 0
    num_refused: int = 0
    num_adapter_requests: dict[str, int] = {}  #: accepted, by LoRA adapter that is loaded now
    num_refused_early: int = 0  #: refused by clients, from a cached refusal of the engine
    num_finished: dict[str, int] = {}  #: by finish reason
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_uncovered_tokens: int = 0  #: K/V was cached, but no checkpoint of the state followed
    #: Cached checkpoints that were lost, by what was lacking: checkpoints, blocks.
    num_evicted_checkpoints: dict[str, int] = {}
    num_computed_tokens: int = 0  #: positions of prompts, answers and drafts
    num_fetched_tokens: int = 0  #: prompt tokens whose K/V was fetched
    num_fetched_bytes: int = 0
    num_fetches_failed: dict[str, int] = {}  #: by kind (kv.KVFailure)
    num_timeouts: dict[str, int] = {}  #: by stage: queued (not started yet), running
    num_leases_ended: dict[str, int] = {}  #: by reason: taken, released, expired, yielded
    num_tier_stored: dict[str, int] = {}  #: number of blocks, by tier; the next three likewise
    num_tier_dropped: dict[str, int] = {}
    num_tier_loaded: dict[str, int] = {}
    num_tier_failed: dict[str, int] = {}
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  #: draft tokens that became part of an answer
    num_images_encoded: int = 0
    num_image_tokens_encoded: int = 0
    num_image_hits: int = 0  #: images of admitted requests that had been encoded before
    image_encode_s: float = 0.0
    num_wire_errors: int = 0
    busy_s: float = 0.0  #: seconds spent on steps
