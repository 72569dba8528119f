"""The routes for operators: health, version, metrics, models."""

from __future__ import annotations

import os
import time
from typing import Any, Literal, TypedDict

import msgspec
from flask import Response, request
from msgspec import UNSET, UnsetType

from gateway.api.anthropic.responses import (
    VERSION_HEADER,
    MessagesErrorAnswer,
    ModelInfo,
    ModelPage,
    model_info,
    model_page,
)
from gateway.api.openai.responses import ErrorAnswer
from gateway.context import RequestContext
from gateway.engine.client import ZmqEngineClient
from gateway.http.route import READING, Parameter, Routes, json_response
from gateway.observe.metrics import CONTENT_TYPE
from gateway.served_model import ServedModel, version
from gateway.service import Service
from protocol.messages import Limits
from protocol.stats import EngineStats, WorkerStatus

# ---- response bodies


class Version(msgspec.Struct, frozen=True):
    version: str


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

    why  the reason the engine is not ready; null if it is ready
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


class ReadinessAnswer(msgspec.Struct, frozen=True):
    """Whether requests can be served.

    why               the reason the server is not ready; null if it is ready
    replicas          the engines of a server with replicas; one of them is enough to be ready
    prefill, decode   the engines of a disaggregated server; one decode engine is enough to be ready
    """

    ready: bool
    why: str | None
    gateway: GatewayFacts
    engine: EngineFacts
    replicas: list[EngineState] | UnsetType = UNSET
    prefill: list[EngineState] | UnsetType = UNSET
    decode: list[EngineState] | UnsetType = UNSET


class Live(msgspec.Struct, frozen=True):
    live: Literal[True]
    gateway: GatewayFacts


class Startup(msgspec.Struct, frozen=True):
    """Whether a model has become available since the start of this process.

    why  the reason no model has become available yet; null otherwise
    """

    started: bool
    why: str | None
    gateway: GatewayFacts
    engine: EngineFacts


class Formats(msgspec.Struct, frozen=True):
    """How answers are parsed.

    tools      the format of tool calls; null: answers are not parsed for tool calls
    reasoning  the format of reasoning; null: answers are not parsed for reasoning
    why        the reason these formats were chosen
    """

    tools: str | None
    reasoning: str | None
    why: str


class SamplingInEffect(msgspec.Struct, frozen=True):
    """The sampling parameters that apply to a request that sets none."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A served model.

    id    one of the model's served names, perhaps the operator's alias
    root  the model's own name
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    default_sampling: SamplingInEffect
    formats: Formats


class Models(msgspec.Struct, frozen=True):
    object: Literal["list"]
    data: list[ModelEntry]


# ---- routes

routes = Routes("Operators", ErrorAnswer)
_VERSION = Parameter(
    "anthropic-version", "If set, responses and errors have Anthropic's shape.", "header"
)
_LIMIT = {"type": "integer", "minimum": 1, "maximum": 1000}
_PAGE = (
    Parameter("limit", "Maximum number of models on a page, in Anthropic's shape.", schema=_LIMIT),
    Parameter("after_id", "Return the models after this id."),
    Parameter("before_id", "Return the models before this id."),
)
_HEALTH: dict[str, Any] = {"scope": "public", "is_probe": True, "statuses": (405, 500)}


@routes.get(
    "/livez",
    scope="public",
    is_probe=True,
    about="Liveness: this process responds.",
    gives=Live,
)
def livez(service: Service, context: RequestContext) -> Response:
    return json_response(Live(live=True, gateway=gateway_facts(service)))


@routes.get(
    "/startupz",
    **_HEALTH,
    about="Startup: a model has become available since this process started.",
    gives=Startup,
    otherwise={503: Startup},
)
def startupz(service: Service, context: RequestContext) -> Response:
    answer = startup(service)
    return _health(answer, is_well=answer.started)


@routes.get(
    "/readyz",
    **_HEALTH,
    about="Readiness: requests can be served now; if not, `why` has the reason.",
    gives=ReadinessAnswer,
    otherwise={503: ReadinessAnswer},
)
@routes.get(
    "/health",
    **_HEALTH,
    about="The same as /readyz.",
    gives=ReadinessAnswer,
    otherwise={503: ReadinessAnswer},
)
def readyz(service: Service, context: RequestContext) -> Response:
    answer = readiness(service)
    return _health(answer, is_well=answer.ready)


def _health(answer: msgspec.Struct, *, is_well: bool) -> Response:
    response = json_response(answer, 200 if is_well else 503)
    if not is_well:
        response.headers["Retry-After"] = "1"
    return response


@routes.get("/version", about="Return the server's version.", gives=Version)
def server_version(service: Service, context: RequestContext) -> Response:
    return json_response(Version(version=version()))


@routes.get(
    "/metrics", scope="metrics", is_probe=True, about="Prometheus metrics.", statuses=(405, 500)
)
def metrics(service: Service, context: RequestContext) -> Response:
    return Response(service.metrics.text(), content_type=CONTENT_TYPE)


@routes.get(
    "/v1/models",
    about="List the served model under each of its names.",
    gives=(Models, ModelPage),
    error=(ErrorAnswer, MessagesErrorAnswer),
    statuses=(400, *READING),
    parameters=(_VERSION, *_PAGE),
)
def models(service: Service, context: RequestContext) -> Response:
    served = service.use().model
    if VERSION_HEADER in request.headers:
        return json_response(model_page(served, request.args))
    listed = [_model(served, name) for name in served.names]
    return json_response(Models(object="list", data=listed))


@routes.get(
    "/v1/models/<path:name>",
    about="Describe one served model.",
    gives=(ModelEntry, ModelInfo),
    error=(ErrorAnswer, MessagesErrorAnswer),
    parameters=(Parameter("name", "A served model name.", place="path"), _VERSION),
)
def model(service: Service, context: RequestContext, name: str) -> Response:
    served = service.use(name).model
    if VERSION_HEADER in request.headers:
        return json_response(model_info(served, name))
    return json_response(_model(served, name))


def _model(served: ServedModel, name: str) -> ModelEntry:
    output_format = served.output_format
    return ModelEntry(
        id=name,
        object="model",
        created=served.created_at,
        owned_by="tidegate",
        root=served.card.name,
        parent=None,
        max_model_len=served.limits.max_len,
        default_sampling=msgspec.convert(served.defaults.effective_values(), SamplingInEffect),
        formats=Formats(
            tools=output_format.tools, reasoning=output_format.reasoning, why=output_format.why
        ),
    )


# ---- health

FRESH_S = 1.9
"""The gateway is not ready if the last message of the engine is older than this. The engine counts
as lost only later. A heartbeat arrives about every PING_EVERY_S."""


def readiness(service: Service) -> ReadinessAnswer:
    """Return whether this process can serve requests, and the facts about itself and the engine.

    The process is not ready if the service reports an error, or if the engine has sent nothing for
    more than FRESH_S seconds.
    """
    trouble, silence_s = service.trouble(), service.host.engine.silence_s
    why = trouble.message if trouble is not None else None
    if why is None and silence_s is not None and silence_s > FRESH_S:
        why = f"the engine has been silent for {silence_s:.1f} s"
    states = {
        role: [
            _engine_state(each.client)
            for each in service.host.engine.connections
            if each.role == role
        ]
        for role in ("replica", "prefill", "decode")
    }
    return ReadinessAnswer(
        ready=why is None,
        why=why,
        gateway=gateway_facts(service),
        engine=_engine_facts(service),
        replicas=states["replica"] or UNSET,
        prefill=states["prefill"] or UNSET,
        decode=states["decode"] or UNSET,
    )


def startup(service: Service) -> Startup:
    """Return whether a model has become available since this process started, and if not, why."""
    trouble = None if service.host.has_served else service.trouble()
    return Startup(
        started=service.host.has_served,
        why=None if trouble is None else trouble.message,
        gateway=gateway_facts(service),
        engine=_engine_facts(service),
    )


def gateway_facts(service: Service) -> GatewayFacts:
    age_s = round(time.monotonic() - service.started_at, 3)
    return GatewayFacts(pid=os.getpid(), draining=service.is_draining(), age_s=age_s)


def _engine_facts(service: Service) -> EngineFacts:
    engine = service.host.engine
    return EngineFacts(
        epoch=engine.epoch,
        silence_s=_rounded(engine.silence_s),
        **engine_activity(engine.stats, engine.limits),
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
