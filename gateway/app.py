"""create_app(config): routes, what surrounds every request, and how errors are told."""

from __future__ import annotations

import os

import flask
import msgspec
from flask import Flask, Response, g, request
from gunicorn.errors import AppImportError
from werkzeug.exceptions import HTTPException

from gateway.admin import routes as admin
from gateway.answering import ClientGone
from gateway.anthropic import errors as anthropic_errors
from gateway.anthropic import routes as anthropic
from gateway.exchange import REQUEST_ID_HEADER, Exchange, request_id_from
from gateway.faults import Fault, fault_of, internal_fault, plain_fault
from gateway.openai import routes as openai
from gateway.openai.errors import error_body
from gateway.openapi import routes as openapi
from gateway.rendering import routes as rendering
from gateway.responses import routes as responses
from gateway.responses.kept import routes as kept_responses
from gateway.resume import routes as streams
from gateway.service import Service
from gateway.tokens import routes as tokens
from protocol.config import GatewayConfig
from protocol.errors import ServingError

CONFIG_VARIABLE = "TIDEGATE_GATEWAY"
EXTENSION = "tidegate"
IGNORED_HEADER = "x-ignored-fields"
ANTHROPIC = "/v1/messages"
ANTHROPIC_REQUEST_ID_HEADER = "request-id"
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that did not wait. Nobody reads it but the log."""
QUIET = frozenset({"admin.livez", "admin.readyz", "admin.health", "admin.metrics"})
"""Asked every few seconds by machines: counted, not logged."""


def config_from_environment() -> GatewayConfig:
    """The config as `tidegate serve` hands it on, as JSON; the defaults without it."""
    return msgspec.json.decode(os.environ.get(CONFIG_VARIABLE, "{}"), type=GatewayConfig)


def create_app(config: GatewayConfig | None = None) -> Flask:
    """The WSGI application, with its `Service` among its extensions. It connects to its engine with
    the first request, or when `gunicorn_conf` starts its service; making it has no effect on the
    world.

    Raises AppImportError, which gunicorn tells in one line, where an option is wrong.
    """
    app = Flask(__name__, static_folder=None)
    try:
        service = Service(config if config is not None else config_from_environment())
    except ValueError as error:
        raise AppImportError(f"the gateway cannot start: {error}") from None
    app.extensions[EXTENSION] = service
    for part in (openai, responses, kept_responses, streams, anthropic, tokens, rendering, admin):
        app.register_blueprint(part.blueprint(service))
    app.register_blueprint(openapi.blueprint())
    _frame_requests(app, service)
    _tell_errors(app)
    return app


def _frame_requests(app: Flask, service: Service) -> None:
    @app.before_request
    def begin() -> None:
        service.start()
        g.exchange = Exchange(
            service.metrics,
            method=request.method,
            path=request.path,
            route=request.url_rule.rule if request.url_rule else "other",
            request_id=request_id_from(request.headers.get(REQUEST_ID_HEADER)),
            logs=service.config.log_requests and request.endpoint not in QUIET,
        )

    @app.after_request
    def end(response: Response) -> Response:
        exchange: Exchange = g.exchange
        response.headers[REQUEST_ID_HEADER] = exchange.request_id
        if _is_anthropic():
            response.headers[ANTHROPIC_REQUEST_ID_HEADER] = exchange.request_id
        if ignored := g.get("ignored"):  # fields that had no effect
            response.headers[IGNORED_HEADER] = ", ".join(ignored)
        if not exchange.is_streaming:  # a stream closes its exchange itself, when it is over
            exchange.close(response.status_code)
        return response


def _tell_errors(app: Flask) -> None:
    @app.errorhandler(ServingError)
    def serving_error(error: ServingError) -> Response:
        return _response(fault_of(error))

    @app.errorhandler(ClientGone)
    def client_gone(error: ClientGone) -> Response:
        return flask.Response(status=CLIENT_CLOSED_REQUEST)

    @app.errorhandler(HTTPException)
    def protocol_error(error: HTTPException) -> Response:
        response = _response(plain_fault(error.code or 500, error.description or error.name))
        for name, value in error.get_headers():
            if name == "Allow":
                response.headers[name] = value
        return response

    @app.errorhandler(Exception)
    def failure(error: Exception) -> Response:
        return _response(internal_fault(error))


def _is_anthropic() -> bool:
    """Whether the path is one of theirs, even where there is no such route: the client is theirs
    all the same."""
    return request.path == ANTHROPIC or request.path.startswith(ANTHROPIC + "/")


def _response(fault: Fault) -> Response:
    if _is_anthropic():
        exchange: Exchange = g.exchange
        body = anthropic_errors.error_body(fault, exchange.request_id)
    else:
        body = error_body(fault)
    response = flask.Response(body, status=fault.status, content_type="application/json")
    response.headers.update(fault.headers)
    if fault.status == 413:  # the rest of the body is still on its way, and nobody will read it
        response.headers["Connection"] = "close"
    return response
