"""The Flask application: `create_app` adds the routes, the request hooks and the error handlers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, TypeVar

import flask
import msgspec
from flask import Flask, Response, request
from gunicorn.errors import AppImportError
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from gateway.api.anthropic import routes as anthropic
from gateway.api.anthropic.responses import VERSION_HEADER
from gateway.api.anthropic.responses import error_body as anthropic_error_body
from gateway.api.batches import batch_routes, file_routes
from gateway.api.batches.runner import BatchRunner
from gateway.api.encode import routes as encode
from gateway.api.infill import routes as infill
from gateway.api.llama_cpp import routes as llama_cpp
from gateway.api.ollama import embed_routes as ollama_embed
from gateway.api.ollama import manage_routes as ollama_manage
from gateway.api.ollama import routes as ollama
from gateway.api.ollama.responses import error_body as ollama_error_body
from gateway.api.openai import resume_routes
from gateway.api.openai import routes as openai
from gateway.api.openai.responses import ErrorAnswer, error_body
from gateway.api.render import routes as rendering
from gateway.api.responses import routes as responses
from gateway.api.responses.events import interrupted_response
from gateway.api.server import adapters, admin, library, web
from gateway.api.tokens import routes as tokens
from gateway.api.watch import routes as watch
from gateway.auth.gate import Gate, RequestHead, Scopes
from gateway.auth.request_head import path_of, printable
from gateway.context import REQUEST_ID_HEADER, RequestContext
from gateway.generation.group import ClientGone
from gateway.generation.record import CLIENT_CLOSED_REQUEST, RequestRecord
from gateway.http.body import OWNER, RESERVATION
from gateway.http.body_memory import BodyReservation
from gateway.http.client_socket import client_socket, linger
from gateway.http.errors import (
    HTTPFault,
    RouteSuggestions,
    fault_of,
    forget_frames,
    internal_fault,
    plain_fault,
)
from gateway.http.internal_call import (
    InternalAnswer,
    InternalOrigin,
    call_internally,
    internal_environ,
    internal_origin,
)
from gateway.http.openapi import document, operation_id
from gateway.http.route import Operation, Route, Routes, json_response
from gateway.observe import access_log
from gateway.observe.tracing import HEADERS
from gateway.served_model import version
from gateway.service import Service
from gateway.store.runs import RESPONSE, STREAM
from protocol.config.gateway import GatewayConfig
from protocol.wire.errors import ServingError

EXTENSION = "tidegate"
"""Key of the `Service` in the extensions of the application."""
CANNOT_START = "the gateway cannot start: "
IGNORED_HEADER = "x-ignored-fields"
ANTHROPIC = "/v1/messages"
MODELS = "/v1/models"
OLLAMA = "/api"
ANTHROPIC_REQUEST_ID_HEADER = "request-id"
CLOSING_STATUSES = (408, 413)
"""Statuses of responses after which the connection is always closed: the body is not complete."""
UNREAD_STATUSES = (400, 401, 403, 404, 405, 415, 429, 503)
"""Statuses of responses that may be sent before the body was read."""
UNREAD_BODY_BYTES = 1 << 16
"""If an unread body is longer, the connection is closed instead of reading the body."""
CONTEXT, HEAD = "tidegate.context", "tidegate.head"
"""Keys of the `RequestContext` and the `RequestHead` in the WSGI environment. Only this module
reads them. Views get the context as an argument."""
INTERRUPT = {RESPONSE: interrupted_response, STREAM: resume_routes.interrupted_stream}
"""Kind of a detached run -> the function that ends it if its process has died."""
E = TypeVar("E", bound=Exception)
own_routes = Routes("Operators", ErrorAnswer)


@own_routes.get("/openapi.json", scope="inference", about="This document.", gives=dict[str, Any])
def openapi_document(service: Service, context: RequestContext) -> Response:
    return json_response(encoded_document())


ROUTES: tuple[Route, ...] = (
    *openai.routes,
    *responses.routes,
    *resume_routes.routes,
    *file_routes.routes,
    *batch_routes.routes,
    *anthropic.routes,
    *encode.routes,
    *tokens.routes,
    *infill.routes,
    *llama_cpp.routes,
    *ollama.routes,
    *ollama_embed.routes,
    *ollama_manage.routes,
    *rendering.routes,
    *admin.routes,
    *adapters.routes,
    *library.routes,
    *watch.routes,
    *web.routes,
    *own_routes,
)
"""The routes of all APIs."""
PROBES = frozenset(route.endpoint for route in ROUTES if route.is_probe)
"""Endpoints of health checks and scrapes. Their requests arrive every few seconds, so they are
counted but not logged."""
OPERATION_IDS = {route.endpoint: operation_id(route.operation) for route in ROUTES}
"""Endpoint -> the id of its operation in the OpenAPI document and in the page /docs."""


def operations() -> list[Operation]:
    """Return the declarations of all routes."""
    return [route.operation for route in ROUTES]


@cache
def encoded_document() -> bytes:
    """Return the OpenAPI document, built on the first call."""
    return msgspec.json.encode(document(operations(), version()))


def create_app(config: GatewayConfig | None = None) -> Flask:
    """Return the WSGI application. Its `Service` is in `app.extensions["tidegate"]`.

    config  None: the config is read from the environment

    This function opens no connection. The service starts when `gunicorn_conf` calls its `start`, or
    on the first request under other servers. Raises AppImportError if an option is invalid, which
    gunicorn prints in one line.
    """
    app = Flask(__name__, static_folder=None)
    app.url_map.merge_slashes = False  # only the canonical path is served: auth/request_head.py
    try:
        service = Service(config or GatewayConfig.from_environment(), INTERRUPT)
    except ValueError as error:
        raise AppImportError(f"{CANNOT_START}{error}") from None
    app.extensions[EXTENSION] = service
    for route in ROUTES:
        _add_route(app, service, route)
    try:
        gate = Gate(
            service.config,
            Scopes(app.url_map.iter_rules(), operations()),
            lambda: service.keys.keyring,
        )
    except ValueError as error:
        raise AppImportError(f"{CANNOT_START}{error}") from None
    _add_request_hooks(app, service, gate)
    _handle_errors(app)
    if service.files is not None:
        service.background.append(
            BatchRunner(service, service.files, partial(answer_internally, app))
        )
    return app


def answer_internally(app: Flask, path: str, body: bytes, origin: InternalOrigin) -> InternalAnswer:
    """Answer a POST request that this process makes itself. If its greenlet is killed, the request
    ends as if its client had disconnected."""
    return call_internally(app.wsgi_app, internal_environ(path, body, origin))


def _add_route(app: Flask, service: Service, route: Route) -> None:
    """Add a route whose view also gets the service and the request's context."""

    def view(**variables: str) -> Response:
        return route.view(service, _context(), **variables)

    rule, methods = route.operation.rule, [route.operation.method]
    app.add_url_rule(rule, route.endpoint, view, methods=methods)


def _context() -> RequestContext:
    context: RequestContext = request.environ[CONTEXT]
    return context


def _add_request_hooks(app: Flask, service: Service, gate: Gate) -> None:
    """Add the hooks that run before and after every view."""

    @app.before_request
    def start_request() -> Response | None:
        """Create the context and admit the request. Return a response only for a CORS preflight."""
        service.start()
        head = request.environ[HEAD] = _request_head()
        is_probe = request.endpoint in PROBES
        context = request.environ[CONTEXT] = RequestContext(
            method=request.method,
            path=printable(path_of(head.target)),
            route=head.rule or "other",
            headers=request.headers,
            environ=request.environ,
            is_probe=is_probe,
            on_close=_record_listeners(service, is_probe=is_probe),
        )
        if gate.is_allowed_preflight(head):
            gate.check_head(head)
            return flask.Response(status=204)
        origin = internal_origin(request.environ)
        if origin is None:
            context.caller = gate.admit(head)
        else:
            context.caller = gate.admit_as(head, origin.caller)
            context.is_background = origin.is_background
        caller = context.caller.name
        request.environ[OWNER] = f"key {caller}" if caller else f"peer {head.peer}"
        return None

    @app.after_request
    def finish_request(response: Response) -> Response:
        """Add the headers that all responses have, and close the context."""
        context = _context()
        response.headers.extend(gate.cors_headers(request.environ[HEAD]))
        response.headers[REQUEST_ID_HEADER] = context.request_id
        if _is_anthropic():
            response.headers[ANTHROPIC_REQUEST_ID_HEADER] = context.request_id
        if service.config.web and 400 <= response.status_code < 500:
            response.headers["Link"] = _help_link()
        if context.ignored:
            response.headers[IGNORED_HEADER] = ", ".join(context.ignored)
        if not context.is_streaming:  # a stream closes its context itself when it ends
            context.close(response.status_code)
        return response

    @app.teardown_request
    def release_request(_error: BaseException | None) -> None:
        """Break the cycles of the environment, so that no memory of the request waits for the
        garbage collector. If the greenlet was killed, close the context."""
        request.environ.pop(HEAD, None)
        context: RequestContext | None = request.environ.pop(CONTEXT, None)
        reservation: BodyReservation | None = request.environ.pop(RESERVATION, None)
        if context is not None and not context.is_streaming:
            context.close(CLIENT_CLOSED_REQUEST)  # no effect if the view has returned
        if reservation is None:
            return
        if context is None or context.is_closed:
            reservation.close()
        else:  # the answer goes on
            context.call_on_close(lambda record: reservation.close())


def _help_link() -> str:
    """Return the Link header (RFC 8288) from an error to the reference of the route."""
    name = OPERATION_IDS.get(request.endpoint or "")
    return f'</reference#{name}>; rel="help"' if name else '</reference>; rel="help"'


def _record_listeners(service: Service, *, is_probe: bool) -> list[Callable[[RequestRecord], None]]:
    """Return the functions that get the record of the current request: metrics, access log and
    tracing."""
    logs = service.config.log_requests and not is_probe
    names_model = service.config.has_several
    log_request = partial(access_log.log_request, names_model=names_model)
    listeners: list[Callable[[RequestRecord], None]] = [service.metrics.count]
    if logs:
        listeners.append(log_request)
    if service.tracing is not None:
        carrier = {name: request.headers[name] for name in HEADERS if name in request.headers}
        listeners.append(partial(service.tracing.export, carrier))
    return listeners


def _request_head() -> RequestHead:
    return RequestHead(
        method=request.method,
        target=request.environ.get("RAW_URI", request.path),
        protocol=request.environ.get("SERVER_PROTOCOL", ""),
        rule=request.url_rule.rule if request.url_rule else None,
        peer=request.remote_addr or "",
        headers=request.headers,
    )


def _handle_errors(app: Flask) -> None:
    """Add the handlers that turn exceptions into JSON errors."""
    suggestions = RouteSuggestions(app.url_map.iter_rules())

    def handles(kind: type[E]) -> Callable[[Callable[[E], Response]], None]:
        """Return a decorator that registers a handler for errors of type `kind`. The error's
        frames are dropped afterwards: they often refer back to the error, and this cycle would
        keep the request in memory until the garbage collector runs."""

        def add(handler: Callable[[E], Response]) -> None:
            @app.errorhandler(kind)
            def handle(error: E) -> Response:
                try:
                    return handler(error)
                finally:
                    forget_frames(error)

        return add

    @handles(ServingError)
    def serving_error(error: ServingError) -> Response:
        return _response(fault_of(error))

    @handles(ClientGone)
    def client_gone(error: ClientGone) -> Response:
        return flask.Response(status=CLIENT_CLOSED_REQUEST)

    @handles(HTTPException)
    def protocol_error(error: HTTPException) -> Response:
        message = error.description or error.name
        if error is request.routing_exception:
            path = path_of(request.environ[HEAD].target)
            if isinstance(error, MethodNotAllowed):
                message = suggestions.not_allowed(request.method, path, error.valid_methods or ())
            else:
                message = suggestions.not_found(request.method, path)
        response = _response(plain_fault(error.code or 500, message))
        for name, value in error.get_headers():
            if name == "Allow":
                response.headers[name] = value
        return response

    @handles(Exception)
    def failure(error: Exception) -> Response:
        return _response(internal_fault(error))


def _is_anthropic() -> bool:
    """Return whether the client uses Anthropic's API, so that errors must have its shape.

    The path decides, even if no route matches it. OpenAI's and Anthropic's APIs share the path
    /v1/models; there, the version header decides.
    """
    if _is_below(MODELS):
        return VERSION_HEADER in request.headers
    return _is_below(ANTHROPIC)


def _is_below(path: str) -> bool:
    """Return whether the current request's path is `path` or a path below it."""
    return request.path == path or request.path.startswith(path + "/")


def _response(fault: HTTPFault) -> Response:
    """Return the error response in the shape of the client's API."""
    if _is_anthropic():
        body = anthropic_error_body(fault, _context().request_id)
    elif _is_below(OLLAMA):
        body = ollama_error_body(fault)
    else:
        body = error_body(fault)
    may_be_unread = fault.status in UNREAD_STATUSES
    is_last = fault.status in CLOSING_STATUSES or (may_be_unread and _has_long_body())
    kind = LastResponse if is_last else flask.Response
    response = kind(body, status=fault.status, content_type="application/json")
    response.headers.update(fault.headers)
    return response


def _has_long_body() -> bool:
    """Return whether the body is longer than UNREAD_BODY_BYTES or has a transfer coding."""
    length = request.content_length
    return "Transfer-Encoding" in request.headers or (length or 0) > UNREAD_BODY_BYTES


class LastResponse(flask.Response):
    """A response after which the server closes the connection, discarding an unread body."""

    def __call__(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        # gunicorn's Response object. gunicorn ignores a Connection header of the application.
        server = getattr(start_response, "__self__", None)
        if server is not None and hasattr(server, "force_close"):
            server.force_close()
            if (sock := client_socket(environ)) is not None:
                self.call_on_close(lambda: linger(sock))
        answer: Iterable[bytes] = super().__call__(environ, start_response)
        return answer
