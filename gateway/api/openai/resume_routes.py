"""Streams that a client can resume after its connection broke.

A stream of a chat or completion is resumable if its request has the header `X-Resume: 1`. The
generation then continues for some time without its client. GET /v1/streams/ID resumes the stream
after the last event that the client received.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from flask import Response

from gateway.api.openai.responses import ErrorAnswer, error_body
from gateway.context import RequestContext
from gateway.generation.frame_sink import FrameDestination
from gateway.generation.group import ChoiceGroup
from gateway.generation.job import Job
from gateway.generation.sinks import Sink
from gateway.http import sse
from gateway.http.errors import HTTPFault, NoSuchId
from gateway.http.route import Parameter, Routes, Stream
from gateway.http.sse import LAST_EVENT_HEADER
from gateway.service import Service
from gateway.store.queries import Interruption, NewRun
from gateway.store.resume import (
    PREFIX,
    NumberedFrames,
    RunTail,
    new_stream_id,
    read_event_id,
    with_id,
)
from gateway.store.runs import STREAM, DetachedRun, Persistence
from protocol.wire.errors import InvalidRequest
from protocol.wire.field_words import one_of

RESUME_HEADER = "X-Resume"
_ON = ("1", "true")
_OFF = ("0", "false")
_DIED = HTTPFault(
    503,
    "the server process that generated this stream ended before it was complete",
    code="engine_lost",
)

routes = Routes("OpenAI", ErrorAnswer, scope="inference")


@routes.get(
    "/v1/streams/<stream_id>",
    about="Resume a stream.\n"
    "Returns the events after `Last-Event-ID` of a chat or completion stream that was "
    "requested with the header `X-Resume: 1` and the same API key.",
    streams=Stream(dict[str, Any], ends_with="[DONE]"),
    statuses=(400, 404, 405, 500, 503),
    parameters=(
        Parameter("stream_id", "The value of the response header `X-Resume`.", place="path"),
        Parameter("Last-Event-ID", "The `id` of the last event received.", place="header"),
    ),
)
def read(service: Service, context: RequestContext, stream_id: str) -> Response:
    """Resume a stream. Without Last-Event-ID, start from the first event."""
    last_event = context.headers.get(LAST_EVENT_HEADER, "")
    if not last_event:
        return resume_stream(service, context, stream_id, after=-1)
    event = _event_of(last_event)
    if event[0] != stream_id:
        raise _wrong_event(last_event, "this stream")
    return resume_stream(service, context, *event)


def resume_stream(
    service: Service, context: RequestContext, stream_id: str, after: int
) -> Response:
    """Stream the events after number `after`, including future ones. Raise NoSuchId if the
    caller owns no such stream."""
    persistence, owner = service.persistence, context.caller.owner
    if (
        persistence is None
        or not stream_id.startswith(PREFIX)
        or not persistence.store.call(
            lambda database: database.page(stream_id, owner, after, time.time(), limit=1)
        )
    ):
        known = "the id of a stored stream, which has not expired"
        raise NoSuchId.of("stream_id", known, stream_id)
    tail = RunTail(persistence.store, stream_id, owner, after, persistence.window_s)
    response = service.runner.stream_from(context, tail)
    response.headers[RESUME_HEADER] = stream_id
    return response


def is_requested(context: RequestContext) -> bool:
    """Return whether the header X-Resume requests a resumable stream. Raise InvalidRequest if it
    has another value than those of a switch."""
    value = context.headers.get(RESUME_HEADER, "").strip()
    if value.lower() not in (*_ON, *_OFF, ""):
        raise InvalidRequest.wrong(RESUME_HEADER, one_of((*_ON, *_OFF)), value)
    return value.lower() in _ON


def _wrong_event(last_event: str, source: str) -> InvalidRequest:
    return InvalidRequest.wrong(LAST_EVENT_HEADER, f"the id of an event of {source}", last_event)


def _event_of(last_event: str) -> tuple[str, int]:
    """Return the stream and the number of the event that the header Last-Event-ID names. Raise
    InvalidRequest if it is no id of an event."""
    event = read_event_id(last_event)
    if event is None:
        raise _wrong_event(last_event, "a stream of this server")
    return event


def start_resumable(
    service: Service, job: Job, make_sink: Callable[[ChoiceGroup, FrameDestination], Sink]
) -> Response:
    """Start a resumable stream. If the request has Last-Event-ID, resume that stream instead.
    Raise InvalidRequest if the server stores no streams."""
    context, runner = job.context, service.runner
    last_event = context.headers.get(LAST_EVENT_HEADER, "")
    if last_event:
        return resume_stream(service, context, *_event_of(last_event))
    persistence = service.persistence
    if persistence is None:
        raise InvalidRequest.at(
            RESUME_HEADER, "this server stores no streams (see --response-store)"
        )
    runs: list[DetachedRun] = []

    def start(group: ChoiceGroup) -> Sink:
        runs.append(_start_run(persistence, context, group))
        detached = runs[0]
        return make_sink(
            group, NumberedFrames(detached.id, detached.write, lambda: detached.close(()))
        )

    runner.detached(job, start)
    response = runner.stream_from(context, runs[0], owns_context=False)
    response.headers[RESUME_HEADER] = runs[0].id
    return response


def _start_run(
    persistence: Persistence, context: RequestContext, group: ChoiceGroup
) -> DetachedRun:
    expires_at = time.time() + persistence.window_s
    new = NewRun(new_stream_id(), context.caller.owner, STREAM, expires_at)
    detached = persistence.runs.start(new)
    detached.abort = lambda: group.fail(
        InvalidRequest("the client did not resume this stream in time")
    )
    return detached


def interrupted_stream(stream: str, number: int, body: bytes | None) -> Interruption:
    """Return the frames that end a stream whose process died: an error and [DONE], numbered from
    `number`."""
    frames = (sse.frame(error_body(_DIED)), sse.DONE)
    numbered = enumerate(frames, number)
    return Interruption(b"".join(with_id(stream.encode(), n, frame) for n, frame in numbered))
