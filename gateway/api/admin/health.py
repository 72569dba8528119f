"""Describes for health checks whether requests can be served, and what the processes are doing."""

from __future__ import annotations

import os
import time
from typing import TypedDict

from msgspec import UNSET

from gateway.api.admin.responses import (
    EngineFacts,
    EngineState,
    GatewayFacts,
    ReadinessAnswer,
    Startup,
)
from gateway.engine.client import ZmqEngineClient
from gateway.service import Service
from protocol.messages import Limits
from protocol.stats import EngineStats, WorkerView

FRESH_S = 1.9
"""With an older heartbeat the gateway is not ready, although the engine's lease may still be valid.
Heartbeats arrive about every PING_EVERY_S."""


def readiness(service: Service) -> ReadinessAnswer:
    """Return whether this process is ready for requests, and the details."""
    trouble, silence_s = service.trouble(), service.engine.silence_s
    why = trouble.message if trouble is not None else None
    if why is None and silence_s is not None and silence_s > FRESH_S:
        why = f"the engine has been silent for {silence_s:.1f} s"
    states = {
        role: [_engine_state(line.engine) for line in service.engine.lines if line.role == role]
        for role in ("prefill", "decode")
    }
    return ReadinessAnswer(
        ready=why is None,
        why=why,
        gateway=gateway_facts(service),
        engine=_engine_facts(service),
        prefill=states["prefill"] or UNSET,
        decode=states["decode"] or UNSET,
    )


def startup(service: Service) -> Startup:
    """Return whether a model has ever been served, and the details."""
    trouble = None if service.has_served else service.trouble()
    return Startup(
        started=service.has_served,
        why=None if trouble is None else trouble.message,
        gateway=gateway_facts(service),
        engine=_engine_facts(service),
    )


def gateway_facts(service: Service) -> GatewayFacts:
    age_s = round(time.monotonic() - service.started_at, 3)
    return GatewayFacts(pid=os.getpid(), draining=service.is_draining(), age_s=age_s)


def _engine_facts(service: Service) -> EngineFacts:
    engine = service.engine
    return EngineFacts(
        epoch=engine.epoch,
        silence_s=_rounded(engine.silence_s),
        **doing(engine.stats, engine.limits),
    )


def _engine_state(engine: ZmqEngineClient) -> EngineState:
    trouble, stats = engine.trouble(), engine.stats
    return EngineState(
        address=engine.address,
        ready=trouble is None,
        why=None if trouble is None else trouble.message,
        epoch=engine.epoch,
        silence_s=_rounded(engine.silence_s),
        running=stats.running if stats else None,
        waiting=stats.waiting if stats else None,
        waiting_tokens=stats.waiting_tokens if stats else None,
        free_blocks=stats.free_blocks if stats else None,
        total_blocks=stats.total_blocks if stats else None,
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


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
