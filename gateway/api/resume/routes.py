"""GET /v1/streams/ID: resumes a stream after the last event its client received."""

from __future__ import annotations

import time

from flask import Blueprint, Response, g, request
from werkzeug.exceptions import NotFound

from gateway.api.resume.numbering import LAST_EVENT_HEADER, PREFIX, read_event_id
from gateway.generation.run import listening
from gateway.service import Service
from gateway.store.run_tail import RunTail
from protocol.errors import InvalidRequest

RESUME_HEADER = "X-Resume"


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("streams", __name__)
    routes.get("/v1/streams/<stream_id>", endpoint="read")(
        lambda stream_id: read(service, stream_id)
    )
    return routes


def read(service: Service, stream_id: str) -> Response:
    """Resume a stream. Without Last-Event-ID, start from the first event."""
    last_event = request.headers.get(LAST_EVENT_HEADER)
    if last_event is None:
        return resume_stream(service, stream_id, after=-1)
    event = read_event_id(last_event)
    if event is None or event[0] != stream_id:
        raise InvalidRequest(
            f"{LAST_EVENT_HEADER}: must be the id of an event of this stream",
            param=LAST_EVENT_HEADER,
        )
    return resume_stream(service, *event)


def resume_stream(service: Service, stream_id: str, after: int) -> Response:
    """Stream the events after number `after`, including those to come. Other owners' streams are
    not found."""
    persistence, owner = service.persistence, g.caller.owner
    exists = persistence is not None and stream_id.startswith(PREFIX)
    if (
        persistence is None
        or not exists
        or not persistence.store.call(
            lambda database: database.page(stream_id, owner, after, time.time(), limit=1)
        )
    ):
        raise NotFound(f"no stream {stream_id!r} is stored; it never existed or has expired")
    tail = RunTail(persistence.store, stream_id, owner, after, persistence.window_s)
    response = listening(service, tail)
    response.headers[RESUME_HEADER] = stream_id
    return response
