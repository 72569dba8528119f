"""Routes for operators: health, version, metrics, models."""

from __future__ import annotations

from typing import Any

import msgspec
from flask import Response, request

from gateway.api.admin import health, responses
from gateway.api.anthropic.models import (
    VERSION_HEADER,
    ModelInfo,
    ModelPage,
    model_info,
    model_page,
)
from gateway.api.anthropic.responses import MessagesErrorAnswer
from gateway.api.openai.responses import ErrorAnswer
from gateway.context import RequestContext
from gateway.http.route import READING, Parameter, Routes, json_response
from gateway.observe.metrics import CONTENT_TYPE
from gateway.served_model import ServedModel, version
from gateway.service import Service

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
    gives=responses.Live,
)
def livez(service: Service, context: RequestContext) -> Response:
    return json_response(responses.Live(live=True, gateway=health.gateway_facts(service)))


@routes.get(
    "/startupz",
    **_HEALTH,
    about="Startup: a model has become available since this process started.",
    gives=responses.Startup,
    otherwise={503: responses.Startup},
)
def startupz(service: Service, context: RequestContext) -> Response:
    answer = health.startup(service)
    return _health(answer, is_well=answer.started)


@routes.get(
    "/readyz",
    **_HEALTH,
    about="Readiness: requests can be served now; if not, `why` has the reason.",
    gives=responses.ReadinessAnswer,
    otherwise={503: responses.ReadinessAnswer},
)
@routes.get(
    "/health",
    **_HEALTH,
    about="The same as /readyz.",
    gives=responses.ReadinessAnswer,
    otherwise={503: responses.ReadinessAnswer},
)
def readyz(service: Service, context: RequestContext) -> Response:
    answer = health.readiness(service)
    return _health(answer, is_well=answer.ready)


def _health(answer: msgspec.Struct, *, is_well: bool) -> Response:
    response = json_response(answer, 200 if is_well else 503)
    if not is_well:
        response.headers["Retry-After"] = "1"
    return response


@routes.get("/version", about="Return the server's version.", gives=responses.Version)
def server_version(service: Service, context: RequestContext) -> Response:
    return json_response(responses.Version(version=version()))


@routes.get(
    "/metrics", scope="metrics", is_probe=True, about="Prometheus metrics.", statuses=(405, 500)
)
def metrics(service: Service, context: RequestContext) -> Response:
    return Response(service.metrics.text(), content_type=CONTENT_TYPE)


@routes.get(
    "/v1/models",
    about="List the served model under each of its names.",
    gives=(responses.Models, ModelPage),
    error=(ErrorAnswer, MessagesErrorAnswer),
    statuses=(400, *READING),
    parameters=(_VERSION, *_PAGE),
)
def models(service: Service, context: RequestContext) -> Response:
    served = service.model()
    if VERSION_HEADER in request.headers:
        return json_response(model_page(served, request.args))
    listed = [_model(served, name) for name in served.names]
    return json_response(responses.Models(object="list", data=listed))


@routes.get(
    "/v1/models/<path:name>",
    about="Describe one served model.",
    gives=(responses.ModelEntry, ModelInfo),
    error=(ErrorAnswer, MessagesErrorAnswer),
    parameters=(Parameter("name", "A served model name.", place="path"), _VERSION),
)
def model(service: Service, context: RequestContext, name: str) -> Response:
    served = service.model(name)
    if VERSION_HEADER in request.headers:
        return json_response(model_info(served, name))
    return json_response(_model(served, name))


def _model(served: ServedModel, name: str) -> responses.ModelEntry:
    output_format = served.output_format
    return responses.ModelEntry(
        id=name,
        object="model",
        created=served.since,
        owned_by="tidegate",
        root=served.card.name,
        parent=None,
        max_model_len=served.limits.max_len,
        default_sampling=msgspec.convert(
            served.defaults.effective_values(), responses.SamplingInEffect
        ),
        formats=responses.Formats(
            tools=output_format.tools, reasoning=output_format.reasoning, why=output_format.why
        ),
    )
