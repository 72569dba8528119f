"""The route /openapi.json. The document is built on the first request."""

from __future__ import annotations

from functools import cache

import flask
import msgspec
from flask import Blueprint, Response

from gateway.http.openapi import document
from gateway.http.operation import Operation
from gateway.served_model import version


def blueprint() -> Blueprint:
    routes = Blueprint("openapi", __name__)
    routes.get("/openapi.json", endpoint="document")(openapi_document)
    return routes


def operations() -> list[Operation]:
    """Return the operations of all APIs. These modules are imported only for documentation."""
    from gateway.api.admin.operations import OPERATIONS as ADMIN
    from gateway.api.anthropic.operations import OPERATIONS as ANTHROPIC
    from gateway.api.openai.operations import OPERATIONS as OPENAI
    from gateway.api.render.operations import OPERATIONS as RENDERING
    from gateway.api.responses.operations import OPERATIONS as RESPONSES
    from gateway.api.resume.operations import OPERATIONS as STREAMS
    from gateway.api.tokens.operations import OPERATIONS as TOKENS

    return [*OPENAI, *RESPONSES, *STREAMS, *ANTHROPIC, *TOKENS, *RENDERING, *ADMIN]


@cache
def encoded() -> bytes:
    return msgspec.json.encode(document(operations(), version()))


def openapi_document() -> Response:
    return flask.Response(encoded(), content_type="application/json")
