"""/openapi.json, made when it is first asked for."""

from __future__ import annotations

from functools import cache

import flask
import msgspec
from flask import Blueprint, Response

from gateway.openapi.document import document
from gateway.openapi.operation import Operation
from gateway.served import version


def blueprint() -> Blueprint:
    routes = Blueprint("openapi", __name__)
    routes.get("/openapi.json", endpoint="document")(tell)
    return routes


def operations() -> list[Operation]:
    """Of all APIs. Their modules are for documentation only, so they are not loaded before."""
    from gateway.admin.operations import OPERATIONS as ADMIN
    from gateway.anthropic.operations import OPERATIONS as ANTHROPIC
    from gateway.openai.operations import OPERATIONS as OPENAI
    from gateway.rendering.operations import OPERATIONS as RENDERING
    from gateway.responses.operations import OPERATIONS as RESPONSES
    from gateway.resume.operations import OPERATIONS as STREAMS
    from gateway.tokens.operations import OPERATIONS as TOKENS

    return [*OPENAI, *RESPONSES, *STREAMS, *ANTHROPIC, *TOKENS, *RENDERING, *ADMIN]


@cache
def encoded() -> bytes:
    return msgspec.json.encode(document(operations(), version()))


def tell() -> Response:
    return flask.Response(encoded(), content_type="application/json")
