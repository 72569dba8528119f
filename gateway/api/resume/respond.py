"""Starts a stream that continues for some time without its client, if a header requests it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from flask import Response, g, request

from gateway.api.resume.numbering import LAST_EVENT_HEADER, Numbered, new_stream_id, read_event_id
from gateway.api.resume.routes import RESUME_HEADER, resume_stream
from gateway.generation import run
from gateway.generation.group import ChoiceGroup
from gateway.generation.request import PromptRequest
from gateway.generation.sinks import Sink
from gateway.service import Service
from gateway.store.persistence import STREAM, Persistence
from gateway.store.queries import NewRun
from gateway.store.runs import DetachedRun
from protocol.errors import InvalidRequest

_ON = ("1", "true")


class Frames(Protocol):
    """The destination of a stream's frames."""

    def write(self, data: bytes) -> None: ...
    @property
    def finish(self) -> Callable[[], None]: ...


def is_requested() -> bool:
    """Whether the current request has the header X-Resume."""
    return request.headers.get(RESUME_HEADER, "").strip().lower() in _ON


def start_resumable(
    service: Service,
    prompt_requests: Sequence[PromptRequest],
    options: run.RequestOptions,
    make_sink: Callable[[ChoiceGroup, Frames], Sink],
) -> Response:
    """Start a resumable stream. If the request has Last-Event-ID, resume that stream instead."""
    last_event = read_event_id(request.headers.get(LAST_EVENT_HEADER, ""))
    if last_event is not None:
        return resume_stream(service, *last_event)
    persistence = service.persistence
    if persistence is None:
        raise InvalidRequest(
            f"{RESUME_HEADER}: this server stores no streams (see --response-store)",
            param=RESUME_HEADER,
        )
    runs: list[DetachedRun] = []

    def start(group: ChoiceGroup) -> Sink:
        runs.append(_start_run(persistence, group))
        detached = runs[0]
        return make_sink(group, Numbered(detached.id, detached.write, lambda: detached.close(())))

    run.detached(service, prompt_requests, options, start)
    response = run.listening(service, runs[0], owns_exchange=False)
    response.headers[RESUME_HEADER] = runs[0].id
    return response


def _start_run(persistence: Persistence, group: ChoiceGroup) -> DetachedRun:
    expires_at = time.time() + persistence.window_s
    new = NewRun(new_stream_id(), g.caller.owner, STREAM, expires_at)
    detached = persistence.runs.start(new)
    detached.abort = lambda: group.fail(
        InvalidRequest("the client did not resume this stream in time")
    )
    return detached
