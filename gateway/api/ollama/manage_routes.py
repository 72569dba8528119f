"""The routes of Ollama's API that download, copy and delete models.

The supervisor does that (`tools/processes/managed_models.py`), because every gateway process must
serve the same models. These views send it the request, and write its replies as Ollama does.
"""

from __future__ import annotations

from collections.abc import Iterator

from flask import Response

from gateway.api.ollama import models, responses
from gateway.api.ollama.requests import NamedModelBody, OllamaCopyBody, OllamaPullBody
from gateway.api.ollama.responses import PullStatus
from gateway.api.ollama.routes import named, read_body
from gateway.api.server.admin import listed_models
from gateway.api.server.library import manager, replies_of
from gateway.auth.gate import Forbidden
from gateway.context import RequestContext
from gateway.generation.group import ClientGone
from gateway.generation.record import CLIENT_CLOSED_REQUEST
from gateway.http.errors import fault_of
from gateway.http.route import INFERENCE, Routes, Stream, json_response
from gateway.http.sse import JSON_LINES
from gateway.service import Service
from protocol.tools.control import (
    CopyModel,
    DeleteModel,
    FromSupervisor,
    ModelStates,
    PullEnded,
    PullModel,
    PullProgress,
)
from protocol.wire.errors import InvalidRequest, ServingError, error_from

LATEST = models.LATEST
STATUSES = (*INFERENCE, 502, 507)

routes = Routes("Ollama", responses.OllamaError, scope="inference")


@routes.post(
    "/api/pull",
    about="Download a model and serve it.\n"
    "The operator must allow that (--manage-models), and the key needs the scope admin. Otherwise "
    "only a served model succeeds.",
    takes=(OllamaPullBody,),
    gives=PullStatus,
    streams=Stream(PullStatus, is_lines=True),
    statuses=STATUSES,
)
def pull(service: Service, context: RequestContext) -> Response:
    body = read_body(service, context, OllamaPullBody)
    listed = listed_models(service)
    name = models.served_name(named(body), listed)
    is_stream = body.stream is not False
    if name in listed:
        return _lines(PullStatus("success")) if is_stream else json_response(PullStatus("success"))
    manager(service, context)
    _check_no_adapter(service, "model", name)
    replies = replies_of(service, context, PullModel(model=name))
    first = next(replies)  # a refusal has its own status
    if not is_stream:
        while not isinstance(first, PullEnded):
            first = next(replies)
        _check(first)
        return json_response(PullStatus("success"))
    context.is_streaming = True
    response = Response(_written(context, first, replies), content_type=JSON_LINES.content_type)
    # The generator does not run if the client disconnects before its first line.
    response.call_on_close(lambda: context.close(CLIENT_CLOSED_REQUEST))
    response.headers["X-Accel-Buffering"] = "no"  # otherwise nginx would buffer the stream
    return response


def _check_no_adapter(service: Service, field: str, name: str) -> None:
    """Raise InvalidRequest for `field` if requests select an adapter by this name. A model with the
    name would hide it."""
    if any(host.adapter_of(name) for host in service.hosts):
        raise InvalidRequest.at(field, f"an adapter is named {name!r}")


def _lines(status: PullStatus) -> Response:
    response = json_response(responses.encode(status) + b"\n")
    response.content_type = JSON_LINES.content_type
    return response


def _written(
    context: RequestContext,
    first: FromSupervisor | None,
    replies: Iterator[FromSupervisor | None],
) -> Iterator[bytes]:
    """Yield the lines of a download. Close the context at the end."""
    status = CLIENT_CLOSED_REQUEST  # if this generator is closed early
    try:
        reply = first
        while not isinstance(reply, PullEnded):
            if isinstance(reply, PullProgress):
                yield responses.encode(_status(reply)) + b"\n"
            elif reply is None:
                yield JSON_LINES.keep_alive
            reply = next(replies)
        _check(reply)
        status = 200
    except ServingError as error:
        fault = fault_of(error)
        status = fault.status
        yield responses.error_body(fault) + b"\n"
    except ClientGone:
        return
    finally:
        context.close(status)


def _status(progress: PullProgress) -> PullStatus:
    if not progress.digest:
        return PullStatus(progress.status)
    return PullStatus(progress.status, progress.digest, progress.total, progress.completed)


def _check(ended: PullEnded) -> None:
    """Raise the error of a download that has failed."""
    if ended.error is not None:
        raise error_from(ended.error)


@routes.post(
    "/api/copy",
    about="Serve a model under one more name.\n"
    "The operator must allow that (--manage-models), and the key needs the scope admin.",
    takes=(OllamaCopyBody,),
    statuses=STATUSES,
)
def copy(service: Service, context: RequestContext) -> Response:
    body = read_body(service, context, OllamaCopyBody)
    manager(service, context)
    source = models.served_name(body.source or "", service.names)
    destination = (body.destination or "").removesuffix(LATEST)
    for field, value in (("source", source), ("destination", destination)):
        if not value:
            raise InvalidRequest.at(field, "this field is required")
    _check_no_adapter(service, "destination", destination)
    _await_change(service, context, CopyModel(source=source, destination=destination))
    return Response(status=200)


@routes.delete(
    "/api/delete",
    about="Remove a name of a model, and its files with the last name.\n"
    "The operator must allow that (--manage-models), and the key needs the scope admin. Open "
    "requests of the model finish first.",
    takes=(NamedModelBody,),
    statuses=STATUSES,
)
def delete(service: Service, context: RequestContext) -> Response:
    body = read_body(service, context, NamedModelBody)
    manager(service, context)
    name = models.served_name(named(body), service.names)
    _await_change(service, context, DeleteModel(model=name))
    return Response(status=200)


def _await_change(
    service: Service, context: RequestContext, message: CopyModel | DeleteModel
) -> None:
    """Have the supervisor change the models, and wait until every gateway process serves the new
    ones. Raises its refusal."""
    for reply in replies_of(service, context, message):
        if isinstance(reply, ModelStates):
            return


@routes.post("/api/push", about="Refused: no model is published from here.", statuses=INFERENCE)
@routes.post("/api/create", about="Refused: no model is created here.", statuses=INFERENCE)
def refuse(service: Service, context: RequestContext) -> Response:
    raise Forbidden(
        "models are neither created nor published through this server: `tidegate pull` downloads a "
        "model, and `tidegate serve` serves it"
    )
