"""What the engine counts and tells: gauges of now, counters since its start."""

from __future__ import annotations

import msgspec


class EngineStats(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A snapshot of one engine. Counters (`num_*` below the line) only grow within an epoch."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    clients: int = 0
    # ---- counters
    num_steps: int = 0
    num_accepted: int = 0
    num_refused: int = 0
    num_finished: dict[str, int] = {}  # by finish reason
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of the drafts
    num_wire_errors: int = 0
    busy_s: float = 0.0  # time spent waiting for workers' results
