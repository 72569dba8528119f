"""Get, delete and cancel stored responses. Other owners' responses are not found."""

from __future__ import annotations

import time
from typing import Any

import flask
import gevent
import msgspec
from flask import Blueprint, Response, g, request
from werkzeug.exceptions import NotFound

from gateway.api.responses.history import UNFINISHED, body_of, input_of
from gateway.api.responses.kept.listing import page_of
from gateway.generation.run import listening
from gateway.service import Service
from gateway.store.database import LEASE_S
from gateway.store.persistence import Persistence
from gateway.store.queries import StoredRecord
from gateway.store.run_tail import RunTail
from protocol.errors import InvalidRequest

CANCEL_POLL_S = 0.05
_TRUE = ("true", "1")


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("kept_responses", __name__)
    one = "/v1/responses/<response_id>"
    routes.get(one, endpoint="read")(lambda response_id: read(service, response_id))
    routes.delete(one, endpoint="delete")(lambda response_id: delete(service, response_id))
    routes.post(f"{one}/cancel", endpoint="cancel")(
        lambda response_id: cancel(service, response_id)
    )
    routes.get(f"{one}/input_items", endpoint="input_items")(
        lambda response_id: input_items(service, response_id)
    )
    return routes


def read(service: Service, response_id: str) -> Response:
    """Return the response or, with `stream`, its events after `starting_after`, including those
    to come."""
    persistence, record = _stored(service, response_id)
    if request.args.get("stream", "").lower() not in _TRUE:
        return flask.Response(record.body, content_type="application/json")
    if not body_of(record)["background"]:
        raise InvalidRequest(
            "stream: events are stored for background responses only", param="stream"
        )
    after = _number("starting_after", default=-1, minimum=0, maximum=1 << 62)
    tail = RunTail(persistence.store, record.id, record.owner, after, persistence.window_s)
    return listening(service, tail)


def delete(service: Service, response_id: str) -> Response:
    persistence, record = _stored(service, response_id)
    persistence.store.call(lambda database: database.delete(record.id, record.owner))
    return _json({"id": record.id, "object": "response", "deleted": True})


def cancel(service: Service, response_id: str) -> Response:
    """Cancel a background response, whichever process runs it. One that has ended is returned
    as it is."""
    persistence, record = _stored(service, response_id)
    if not body_of(record)["background"]:
        raise InvalidRequest(f"{response_id}: only a background response can be cancelled")
    if body_of(record)["status"] in UNFINISHED:
        persistence.store.call(lambda database: database.cancel(record.id, record.owner))
        persistence.runs.abort(record.id)
        record = _await_end(persistence, record)
    return flask.Response(record.body, content_type="application/json")


def _await_end(persistence: Persistence, record: StoredRecord) -> StoredRecord:
    """Wait until the response has ended: written by its process, or, if that died, by another one
    that marks it as interrupted."""
    until = time.monotonic() + 2 * LEASE_S
    while body_of(record)["status"] in UNFINISHED and time.monotonic() < until:
        gevent.sleep(CANCEL_POLL_S)
        record = _get(persistence, record.id, record.owner)
    return record


def input_items(service: Service, response_id: str) -> Response:
    """List the items of the response's own request, without those of previous responses."""
    _, record = _stored(service, response_id)
    order = request.args.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: must be asc or desc", param="order")
    limit = _number("limit", default=20, minimum=1, maximum=100)
    items = input_of(record)
    return _json(
        page_of(items if order == "asc" else items[::-1], limit, request.args.get("after"))
    )


def _stored(service: Service, response_id: str) -> tuple[Persistence, StoredRecord]:
    persistence = service.persistence
    if persistence is None:
        raise NotFound("this server stores no responses (see --response-store)")
    return persistence, _get(persistence, response_id, g.caller.owner)


def _get(persistence: Persistence, response_id: str, owner: str) -> StoredRecord:
    record = persistence.store.call(lambda database: database.get(response_id, owner, time.time()))
    if record is None:
        raise NotFound(f"no response {response_id!r} is stored")
    return record


def _number(name: str, *, default: int, minimum: int, maximum: int) -> int:
    text = request.args.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or not minimum <= int(text[:20]) <= maximum:
        raise InvalidRequest(f"{name}: must be a number from {minimum} to {maximum}", param=name)
    return int(text)


def _json(value: Any) -> Response:
    return flask.Response(msgspec.json.encode(value), content_type="application/json")
