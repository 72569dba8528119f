"""The routes for operators: health, version, metrics, models, and to unload and load a model."""

from __future__ import annotations

from typing import Any, Literal

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
from gateway.api.server.health import (
    Live,
    ReadinessAnswer,
    Startup,
    gateway_facts,
    readiness,
    startup,
)
from gateway.api.server.library import may_manage
from gateway.context import RequestContext
from gateway.http.route import READING, Parameter, Routes, json_response
from gateway.model_host import ListedModel, ModelHost
from gateway.observe.metrics import CONTENT_TYPE
from gateway.served_model import version
from gateway.service import Service
from protocol.engine.encoding import EncodeTask, EncodingCard
from protocol.engine.messages import Limits
from protocol.wire.errors import EngineNotReady

# ---- response bodies


class Version(msgspec.Struct, frozen=True):
    """The server's version.

    manages_models  true if the caller may download, copy and delete models; otherwise absent
    """

    version: str
    manages_models: Literal[True] | UnsetType = UNSET


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
    """The sampling parameters that apply to a request that sets none.

    bad_words_ids  sequences of tokens that no answer contains, whatever the request's `bad_words`
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_tokens: int
    logit_bias: dict[int, float]
    bad_words_ids: list[list[int]]


class EncodingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a model that encodes.

    task        embed: vectors of texts; score: scores of pairs of texts
    max_tokens  most tokens of an input
    size        numbers in a vector; 1 for a model that scores
    pooling     how a vector is made of those of the tokens; null for a model that scores
    prompts     names for the field `prompt_name`
    """

    task: EncodeTask
    max_tokens: int
    size: int
    pooling: str | None
    prompts: list[str]

    @classmethod
    def from_card(cls, encoding: EncodingCard) -> EncodingFacts:
        return cls(
            task=encoding.task,
            max_tokens=encoding.max_tokens,
            size=encoding.size,
            pooling=encoding.pooling or None,
            prompts=list(encoding.prompts),
        )


class StateFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The recurrent states of a model in an engine.

    bytes            size of the state of one request, and of a checkpoint
    num_checkpoints  number of states that the prefix cache can keep
    """

    bytes: int
    num_checkpoints: int


class ImageInput(msgspec.Struct, frozen=True):
    """Whether a model reads images.

    why  why they are refused; "" if they are accepted
    """

    accepted: bool
    why: str


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A served model.

    id         one of the model's served names, perhaps the operator's alias; the name of an adapter
    root       the model's own name; the path of an adapter, as the operator gave it
    parent     the main name of the model that an adapter changes; null for a model
    state      ready, loading, failed, unloaded, waiting (for other models to make room) or stopping
    generates  whether the model generates text
    encoding   what the model encodes; absent if nothing
    max_slots  number of requests that an engine computes at the same time; absent if the model has
               not been loaded yet, or has no engine
    states     its recurrent states; absent if the model has none, or has not been loaded yet
    formats    absent if the model has not been loaded yet
    fill_in_middle  whether the model can write the text between a prefix and a suffix; absent if
               the model has not been loaded yet
    images     absent if the model has not been loaded yet
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    state: str
    generates: bool
    encoding: EncodingFacts | UnsetType = UNSET
    default_sampling: SamplingInEffect
    max_slots: int | UnsetType = UNSET
    states: StateFacts | UnsetType = UNSET
    formats: Formats | UnsetType = UNSET
    fill_in_middle: bool | UnsetType = UNSET
    images: ImageInput | UnsetType = UNSET


class Sleeping(msgspec.Struct, frozen=True):
    """Whether a model is unloaded."""

    is_sleeping: bool


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


@routes.get("/version", scope="inference", about="Return the server's version.", gives=Version)
def server_version(service: Service, context: RequestContext) -> Response:
    manages: Literal[True] | UnsetType = True if may_manage(service, context) else UNSET
    return json_response(Version(version(), manages))


@routes.get(
    "/metrics", scope="metrics", is_probe=True, about="Prometheus metrics.", statuses=(405, 500)
)
def metrics(service: Service, context: RequestContext) -> Response:
    return Response(service.metrics.text(), content_type=CONTENT_TYPE)


@routes.get(
    "/v1/models",
    scope="inference",
    about="List the served models, each under all of its names, and their LoRA adapters.",
    gives=(Models, ModelPage),
    error=(ErrorAnswer, MessagesErrorAnswer),
    statuses=(400, *READING),
    parameters=(_VERSION, *_PAGE),
)
def models(service: Service, context: RequestContext) -> Response:
    listed = listed_models(service)
    if VERSION_HEADER in request.headers:
        return json_response(model_page(listed, request.args))
    entries = [_model(facts, name) for name, facts in listed.items()]
    return json_response(Models(object="list", data=entries))


@routes.get(
    "/v1/models/<path:name>",
    scope="inference",
    about="Describe one served model or LoRA adapter.",
    gives=(ModelEntry, ModelInfo),
    error=(ErrorAnswer, MessagesErrorAnswer),
    parameters=(Parameter("name", "A served model name.", place="path"), _VERSION),
)
def model(service: Service, context: RequestContext, name: str) -> Response:
    facts = listed_models(service).get(name)
    if facts is None and (found := _adapter_of_model(service, name)) is not None:
        facts, name = found, found.names[0]
    if facts is None:
        raise service.unknown_model(name)
    if VERSION_HEADER in request.headers:
        return json_response(model_info(facts, name))
    return json_response(_model(facts, name))


def _adapter_of_model(service: Service, name: str) -> ListedModel | None:
    """Return the adapter that is named as MODEL:ADAPTER; None if this model has no such adapter."""
    model, _, adapter = name.rpartition(":")
    host = next((each for each in service.hosts if model in each.names), None)
    if host is None or (facts := host.facts()) is None:
        return None
    return host.adapter_facts(facts).get(adapter)


def listed_models(service: Service) -> dict[str, ListedModel]:
    """Return the models to list, by all names. Raises the error of all requests if none can be
    described, because its engine has not reported it."""
    service.check_models_known()
    hosts = service.hosts
    if not service.config.has_several and (trouble := service.trouble()) is not None:
        raise trouble
    described = [(host, facts) for host in hosts if (facts := host.facts()) is not None]
    if not described:
        raise service.trouble() or EngineNotReady("no engine has reported its model yet")
    listed = {name: facts for _, facts in described for name in facts.names}
    for host, facts in described:
        for name, adapter in host.adapter_facts(facts).items():
            listed.setdefault(name, adapter)  # after all models: many clients use the first entry
    return listed


def _model(facts: ListedModel, name: str) -> ModelEntry:
    output_format = facts.output_format
    formats: Formats | UnsetType = UNSET
    if output_format is not None:
        formats = Formats(
            tools=output_format.tools, reasoning=output_format.reasoning, why=output_format.why
        )
    encoding, refusal = facts.card.encoding, facts.image_refusal
    return ModelEntry(
        id=name,
        object="model",
        created=facts.created_at,
        owned_by="tidegate",
        root=facts.root,
        parent=facts.parent or None,
        max_model_len=facts.max_len,
        state=facts.state,
        generates=facts.card.generates,
        encoding=UNSET if encoding is None else EncodingFacts.from_card(encoding),
        default_sampling=msgspec.convert(facts.defaults.effective_values(), SamplingInEffect),
        max_slots=facts.max_slots or UNSET,
        states=_states(facts.limits),
        formats=formats,
        fill_in_middle=UNSET if facts.fills_in_middle is None else facts.fills_in_middle,
        images=UNSET if refusal is None else ImageInput(accepted=not refusal, why=refusal),
    )


def _states(limits: Limits | None) -> StateFacts | UnsetType:
    if limits is None or not limits.state_bytes:
        return UNSET
    return StateFacts(bytes=limits.state_bytes, num_checkpoints=limits.num_checkpoints)


# ---- unloading and loading a model, as in vLLM

_MODEL = Parameter("model", "A served model name; may be left out if there is only one model.")
_LEVEL = Parameter(
    "level", "vLLM's level of sleep. All memory is freed at each level.", schema={"enum": [1, 2]}
)


@routes.post(
    "/sleep",
    scope="admin",
    about="Unload a model: let its open requests finish, then stop its engines.\n"
    "The next request for the model loads it again.",
    gives=Sleeping,
    statuses=(400, *READING),
    parameters=(_MODEL, _LEVEL),
)
def sleep(service: Service, context: RequestContext) -> Response:
    host = _named_host(service)
    host.sleep()
    return json_response(Sleeping(is_sleeping=host.is_unloaded))


@routes.post(
    "/wake_up",
    scope="admin",
    about="Load a model, and wait until it is ready.",
    gives=Sleeping,
    statuses=(400, *READING),
    parameters=(_MODEL,),
)
def wake_up(service: Service, context: RequestContext) -> Response:
    name = request.args.get("model")
    service.use(context, name)
    return json_response(Sleeping(is_sleeping=service.host(name).is_unloaded))


@routes.get(
    "/is_sleeping",
    scope="admin",
    about="Return whether a model is unloaded.",
    gives=Sleeping,
    statuses=(400, *READING),
    parameters=(_MODEL,),
)
def is_sleeping(service: Service, context: RequestContext) -> Response:
    return json_response(Sleeping(is_sleeping=_named_host(service).is_unloaded))


def _named_host(service: Service) -> ModelHost:
    """Return the host that the parameter `model` names."""
    name = request.args.get("model")
    host = service.host(name)
    if name is not None and host.names and name not in host.names:
        raise service.unknown_model(name)
    return host
