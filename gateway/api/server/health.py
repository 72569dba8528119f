"""The health of this process and of the models: the bodies of /livez, /startupz and /readyz."""

from __future__ import annotations

import os
import time
from typing import Literal, TypedDict

import msgspec
from msgspec import UNSET, UnsetType

from gateway.engine.client import ZmqEngineClient
from gateway.gateway_start import READY
from gateway.model_host import ModelHost
from gateway.service import Service
from protocol.engine.messages import Limits
from protocol.engine.stats import EngineStats, WorkerStatus

# ---- response bodies


class GatewayFacts(msgspec.Struct, frozen=True):
    """The gateway process that sent this response. `age_s` is the time since the process
    started."""

    pid: int
    draining: bool
    age_s: float


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state, mostly from its last heartbeat. Unknown fields are null. Before the first
    connection all fields are unknown.

    epoch            identifies one run of the engine process; it changes when the engine restarts
    silence_s        seconds since the engine's last message
    steps            steps planned so far
    doing            the worker's activity in words, such as "idle"
    worker_step_s    age of the worker's current step
    """

    epoch: str | None
    silence_s: float | None
    pid: int | None = None
    steps: int | None = None
    doing: str | None = None
    worker_pid: int | None = None
    worker_step_s: float | None = None


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """One of several engines of a server. The counts come from its last heartbeat. They are null
    if the engine is not connected or has sent no heartbeat.

    why                the reason the engine is not ready; null if it is ready
    total_checkpoints  checkpoints of recurrent states; 0: the model has none
    """

    address: str
    ready: bool
    why: str | None
    epoch: str | None
    silence_s: float | None
    running: int | None
    waiting: int | None
    waiting_tokens: int | None
    free_blocks: int | None
    total_blocks: int | None
    used_checkpoints: int | None
    total_checkpoints: int | None


class ModelHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a server with several.

    state      ready, loading, failed, unloaded, waiting (for other models to make room) or stopping
    is_wanted  whether the server is not ready without it: it is loaded at the start, and nothing
               has unloaded it
    why        the reason the model is not ready; null if it is ready
    """

    id: str
    state: str
    ready: bool
    is_wanted: bool
    why: str | None
    engines: list[EngineState]


class ReadinessAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether requests can be served, whichever of the gateway processes of this port accepts them.
    With several models: for each model that should be loaded.

    why               the reason the server is not ready; null if it is ready
    engine            the engine of a server with one model
    replicas          the engines of a server with replicas; one of them is enough to be ready
    prefill, decode   the engines of a disaggregated server; one decode engine is enough to be ready
    models            the models of a server with several
    """

    ready: bool
    why: str | None
    gateway: GatewayFacts
    engine: EngineFacts | UnsetType = UNSET
    replicas: list[EngineState] | UnsetType = UNSET
    prefill: list[EngineState] | UnsetType = UNSET
    decode: list[EngineState] | UnsetType = UNSET
    models: list[ModelHealth] | UnsetType = UNSET


class Live(msgspec.Struct, frozen=True):
    live: Literal[True]
    gateway: GatewayFacts


class Startup(msgspec.Struct, frozen=True):
    """Whether each model that is loaded at the start has become available since the start of this
    process.

    why     the reason a model has not become available yet; null otherwise
    engine  the engine of a server with one model
    """

    started: bool
    why: str | None
    gateway: GatewayFacts
    engine: EngineFacts | UnsetType = UNSET


FRESH_S = 1.9
"""The gateway is not ready if the last message of the engine is older than this. The engine counts
as lost only later. A heartbeat arrives about every PING_EVERY_S."""


def readiness(service: Service) -> ReadinessAnswer:
    """Return whether requests can be served, and the facts about this process and the engines.

    The server is not ready if the service reports an error, if an engine has sent nothing for more
    than FRESH_S seconds, or if another process of its port has not been ready since their start.
    """
    trouble = service.trouble()
    reasons = [reason for host in service.hosts if host.is_awaited and (reason := _problem(host))]
    why = trouble.message if trouble is not None else next(iter(reasons), None)
    if why is None:
        service.place.set_state(READY)
        why = service.place.start.trouble()
    facts = gateway_facts(service)
    if service.config.has_several:
        models = [_model_health(host) for host in service.hosts]
        return ReadinessAnswer(ready=why is None, why=why, gateway=facts, models=models)
    (host,) = service.hosts
    return ReadinessAnswer(
        ready=why is None,
        why=why,
        gateway=facts,
        engine=_engine_facts(host),
        replicas=_engine_states(host, "replica") or UNSET,
        prefill=_engine_states(host, "prefill") or UNSET,
        decode=_engine_states(host, "decode") or UNSET,
    )


def startup(service: Service) -> Startup:
    """Return whether each model that is loaded at the start has become available since this process
    started, and if not, why."""
    late = [host for host in service.hosts if host.is_awaited and not host.has_served]
    trouble = late[0].trouble() if late else None
    return Startup(
        started=not late,
        why=None if trouble is None else trouble.message,
        gateway=gateway_facts(service),
        engine=UNSET if service.config.has_several else _engine_facts(service.hosts[0]),
    )


def _problem(host: ModelHost) -> str | None:
    """Return why the model is not ready, or None."""
    if (trouble := host.trouble()) is not None:
        return trouble.message
    silence_s = host.engine.silence_s
    if silence_s is not None and silence_s > FRESH_S:
        return f"the engine has been silent for {silence_s:.1f} s"
    return None


def _model_health(host: ModelHost) -> ModelHealth:
    why = _problem(host)
    return ModelHealth(
        id=host.name,
        state=host.state,
        ready=why is None,
        is_wanted=host.is_wanted,
        why=why,
        engines=_engine_states(host),
    )


def gateway_facts(service: Service) -> GatewayFacts:
    age_s = round(time.monotonic() - service.started_at, 3)
    return GatewayFacts(pid=os.getpid(), draining=service.is_draining(), age_s=age_s)


def _engine_facts(host: ModelHost) -> EngineFacts:
    engine = host.engine
    return EngineFacts(
        epoch=engine.epoch,
        silence_s=_rounded(engine.silence_s),
        **engine_activity(engine.stats, engine.limits),
    )


def _engine_states(host: ModelHost, role: str | None = None) -> list[EngineState]:
    """Return the states of the engines with this role, or of all engines if `role` is None."""
    connections = host.engine.connections
    return [_engine_state(each.client) for each in connections if role in (None, each.role)]


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
        used_checkpoints=stats.held_checkpoints + stats.cached_checkpoints if stats else None,
        total_checkpoints=stats.total_checkpoints if stats else None,
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


class EngineActivity(TypedDict, total=False):
    """The fields of `EngineFacts` that come from a heartbeat."""

    pid: int
    steps: int
    doing: str
    worker_pid: int
    worker_step_s: float


def engine_activity(stats: EngineStats | None, limits: Limits | None) -> EngineActivity:
    """Return the engine's activity as of its last heartbeat; {} before the first heartbeat."""
    if stats is None or limits is None:
        return {}
    worker = stats.worker
    return {
        "pid": worker.engine_pid,
        "steps": stats.num_steps,
        "doing": describe_worker(worker, limits.token_budget),
        "worker_pid": worker.pid,
        "worker_step_s": round(worker.step_s, 3),
    }


def describe_worker(worker: WorkerStatus, token_budget: int) -> str:
    """Describe the worker's activity: "computing step 8 for 1.2 s (1.5 s expected): chunk 3 of 12".

    The number of chunks is a lower bound: it assumes that each has `token_budget` tokens, which is
    the maximum.
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
