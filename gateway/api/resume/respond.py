"""Starts a stream that continues for some time without its client, if a header requests it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from flask import Response, g, request

from gateway.api.resume.numbering import LAST_EVENT_HEADER, Numbered, new_stream_id, read_event_id
from gateway.api.resume.routes import RESUME_HEADER, picked_up
from gateway.generation import run as any_api
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


def is_wanted() -> bool:
    """Whether the current request has the header X-Resume."""
    return request.headers.get(RESUME_HEADER, "").strip().lower() in _ON


def resumable(
    service: Service,
    asks: Sequence[PromptRequest],
    terms: any_api.RequestOptions,
    sink_of: Callable[[ChoiceGroup, Frames], Sink],
) -> Response:
    """Start a resumable stream. If the request has Last-Event-ID, resume that stream instead."""
    heard = read_event_id(request.headers.get(LAST_EVENT_HEADER, ""))
    if heard is not None:
        return picked_up(service, *heard)
    keeping = service.keeping
    if keeping is None:
        raise InvalidRequest(
            f"{RESUME_HEADER}: this server stores no streams (see --response-store)",
            param=RESUME_HEADER,
        )
    runs: list[DetachedRun] = []

    def begin(answer: ChoiceGroup) -> Sink:
        runs.append(_begun(keeping, answer))
        run = runs[0]
        return sink_of(answer, Numbered(run.id, run.write, lambda: run.close(())))

    any_api.detached(service, asks, terms, begin)
    response = any_api.listening(service, runs[0], owns_exchange=False)
    response.headers[RESUME_HEADER] = runs[0].id
    return response


def _begun(keeping: Persistence, answer: ChoiceGroup) -> DetachedRun:
    wanted_until = time.time() + keeping.window_s
    new = NewRun(new_stream_id(), g.caller.owner, STREAM, wanted_until)
    run = keeping.runs.begin(new)
    run.abort = lambda: answer.fail(InvalidRequest("the client did not resume this stream in time"))
    return run
