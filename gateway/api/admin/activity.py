"""Describes what an engine and its worker are doing, for /readyz."""

from __future__ import annotations

from typing import TypedDict

from protocol.messages import Limits
from protocol.stats import EngineStats, WorkerView


class Doing(TypedDict, total=False):
    """The fields of `responses.EngineFacts` that come from a heartbeat."""

    pid: int
    steps: int
    doing: str
    worker_pid: int
    worker_step_s: float


def doing(stats: EngineStats | None, limits: Limits | None) -> Doing:
    """Return the engine's activity. Empty if this engine process sent no heartbeat yet."""
    if stats is None or limits is None:
        return {}
    worker = stats.worker
    return {
        "pid": worker.engine_pid,
        "steps": stats.num_steps,
        "doing": in_words(worker, limits.token_budget),
        "worker_pid": worker.pid,
        "worker_step_s": round(worker.step_s, 3),
    }


def in_words(worker: WorkerView, token_budget: int) -> str:
    """Return the worker's activity: "computing step 8 for 1.2 s (1.5 s expected): chunk 3 of 12".

    A chunk has at most `token_budget` tokens, so the number of chunks is a lower bound.
    """
    if worker.trouble:
        return worker.trouble
    if not worker.step:
        return "idle"
    expected = f" ({worker.expected_s:.1f} s expected)" if worker.expected_s else ""
    text = f"computing step {worker.step} for {worker.step_s:.1f} s{expected}"
    if not worker.prompt_tokens:
        return text
    chunk = worker.computed_tokens // token_budget + 1
    return f"{text}: chunk {chunk} of {max(chunk, -(-worker.prompt_tokens // token_budget))}"
