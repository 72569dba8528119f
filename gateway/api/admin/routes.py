"""Routes for operators: health, version, metrics, models."""

from __future__ import annotations

from typing import Any

import flask
import msgspec
from flask import Blueprint, Response, request

from gateway.api.anthropic.models import VERSION_HEADER, model_info, model_page
from gateway.observe.metrics import CONTENT_TYPE
from gateway.served_model import ServedModel, version
from gateway.service import Service


def blueprint(service: Service) -> Blueprint:
    """Return the routes.

    /livez      200 while this process responds
    /startupz   200 from the moment a model has become available
    /readyz     200 if requests can be served now; the body has the processes' state and the reason
    /health     the same as /readyz, for clients of other servers
    """
    routes = Blueprint("admin", __name__)
    routes.get("/livez", endpoint="livez")(
        lambda: _json({"live": True, "gateway": service.processes()["gateway"]})
    )
    routes.get("/startupz", endpoint="startupz")(lambda: _health(*service.startup()))
    routes.get("/readyz", endpoint="readyz")(lambda: _health(*service.readiness()))
    routes.get("/health", endpoint="health")(lambda: _health(*service.readiness()))
    routes.get("/version", endpoint="version")(lambda: _json({"version": version()}))
    routes.get("/metrics", endpoint="metrics")(
        lambda: flask.Response(service.metrics.text(), content_type=CONTENT_TYPE)
    )
    routes.get("/v1/models", endpoint="models")(lambda: models(service))
    routes.get("/v1/models/<path:name>", endpoint="model")(lambda name: model(service, name))
    return routes


def _health(is_well: bool, facts: dict[str, object]) -> Response:
    response = _json(facts, 200 if is_well else 503)
    if not is_well:
        response.headers["Retry-After"] = "1"
    return response


def models(service: Service) -> Response:
    served = service.model()
    if VERSION_HEADER in request.headers:
        return _json(model_page(served, request.args))
    return _json({"object": "list", "data": [_model(served, name) for name in served.names]})


def model(service: Service, name: str) -> Response:
    served = service.model(name)
    if VERSION_HEADER in request.headers:
        return _json(model_info(served, name))
    return _json(_model(served, name))


def _model(served: ServedModel, name: str) -> dict[str, Any]:
    output_format = served.output_format
    return {
        "id": name,
        "object": "model",
        "created": served.since,
        "owned_by": "tidegate",
        "root": served.card.name,
        "parent": None,
        "max_model_len": served.limits.max_len,
        "default_sampling": served.defaults.effective_values(),
        "formats": {
            "tools": output_format.tools,
            "reasoning": output_format.reasoning,
            "why": output_format.why,
        },
    }


def _json(value: Any, status: int = 200) -> Response:
    return flask.Response(
        msgspec.json.encode(value), status=status, content_type="application/json"
    )
