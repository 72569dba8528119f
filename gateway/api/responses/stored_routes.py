"""Get, delete and cancel stored responses. Other owners' responses are not found."""

from __future__ import annotations

import time
from collections.abc import Sequence

import gevent
from flask import Response, request
from werkzeug.exceptions import NotFound

from gateway.api.openai.responses import ErrorAnswer
from gateway.api.responses.history import UNFINISHED, body_of, input_of
from gateway.api.responses.items import Item
from gateway.api.responses.responses import ItemList, ResponseDeleted, ResponseEvent, ResponseObject
from gateway.context import RequestContext
from gateway.generation.run import follow
from gateway.http.route import Parameter, Routes, Stream, json_response
from gateway.service import Service
from gateway.store.database import LEASE_S
from gateway.store.queries import StoredRecord
from gateway.store.run_tail import RunTail
from gateway.store.runs import Persistence
from protocol.errors import InvalidRequest

CANCEL_POLL_S = 0.05
_TRUE = ("true", "1")


routes = Routes("Responses", ErrorAnswer)
ONE = "/v1/responses/<response_id>"
ID = Parameter("response_id", "The id of a stored response.", place="path")
STORED = (400, 404, 405, 500)
_INT = {"type": "integer", "minimum": 0}
_ORDER = {"enum": ["asc", "desc"]}
_LIMIT = {"type": "integer", "minimum": 1, "maximum": 100}


@routes.get(
    ONE,
    about="Get a stored response.\n"
    "With `stream=true`, stream the events of a background response after `starting_after`, "
    "including those to come.",
    gives=ResponseObject,
    streams=Stream(ResponseEvent),
    statuses=STORED,
    parameters=(
        ID,
        Parameter("stream", "`true`: return server-sent events."),
        Parameter("starting_after", "The sequence number of the last event received.", schema=_INT),
    ),
)
def read(service: Service, context: RequestContext, response_id: str) -> Response:
    persistence, record = _stored(service, context, response_id)
    if request.args.get("stream", "").lower() not in _TRUE:
        return json_response(record.body)
    if not body_of(record)["background"]:
        raise InvalidRequest.at("stream", "events are stored for background responses only")
    after = _number("starting_after", default=-1, minimum=0, maximum=1 << 62)
    tail = RunTail(persistence.store, record.id, record.owner, after, persistence.window_s)
    return follow(service, context, tail)


@routes.delete(
    ONE,
    about="Delete a stored response.",
    gives=ResponseDeleted,
    statuses=STORED,
    parameters=(ID,),
)
def delete(service: Service, context: RequestContext, response_id: str) -> Response:
    persistence, record = _stored(service, context, response_id)
    persistence.store.call(lambda database: database.delete(record.id, record.owner))
    return json_response(ResponseDeleted(id=record.id, object_="response", deleted=True))


@routes.post(
    f"{ONE}/cancel",
    about="Cancel a background response.\nA response that has ended is returned unchanged.",
    gives=ResponseObject,
    statuses=STORED,
    parameters=(ID,),
)
def cancel(service: Service, context: RequestContext, response_id: str) -> Response:
    """Cancel a background response, whichever process runs it. One that has ended is returned
    as it is."""
    persistence, record = _stored(service, context, response_id)
    if not body_of(record)["background"]:
        raise InvalidRequest(f"{response_id}: only a background response can be cancelled")
    if body_of(record)["status"] in UNFINISHED:
        persistence.store.call(lambda database: database.cancel(record.id, record.owner))
        persistence.runs.abort(record.id)
        record = _await_end(persistence, record)
    return json_response(record.body)


def _await_end(persistence: Persistence, record: StoredRecord) -> StoredRecord:
    """Wait until the response has ended: written by its process, or, if that died, by another one
    that marks it as interrupted."""
    until = time.monotonic() + 2 * LEASE_S
    while body_of(record)["status"] in UNFINISHED and time.monotonic() < until:
        gevent.sleep(CANCEL_POLL_S)
        record = _get(persistence, record.id, record.owner)
    return record


@routes.get(
    f"{ONE}/input_items",
    about="List the input items of a response's own request.",
    gives=ItemList,
    statuses=STORED,
    parameters=(
        ID,
        Parameter("order", "Sort order; by default `desc`, the last item first.", schema=_ORDER),
        Parameter("limit", "Maximum number of items; by default 20.", schema=_LIMIT),
        Parameter("after", "Return the items after this id."),
    ),
)
def input_items(service: Service, context: RequestContext, response_id: str) -> Response:
    """List the items of the response's own request, without those of previous responses."""
    _, record = _stored(service, context, response_id)
    order = request.args.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest.at("order", "must be asc or desc")
    limit = _number("limit", default=20, minimum=1, maximum=100)
    items = input_of(record)
    return json_response(
        page_of(items if order == "asc" else items[::-1], limit, request.args.get("after"))
    )


def _stored(
    service: Service, context: RequestContext, response_id: str
) -> tuple[Persistence, StoredRecord]:
    persistence = service.persistence
    if persistence is None:
        raise NotFound("this server stores no responses (see --response-store)")
    return persistence, _get(persistence, response_id, context.caller.owner)


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
        raise InvalidRequest.at(name, f"must be a number from {minimum} to {maximum}")
    return int(text)


def page_of(items: Sequence[Item], limit: int, after: str | None) -> ItemList:
    """Return at most `limit` items, starting after the one with the id `after`."""
    ids = [item["id"] for item in items]
    start = 0
    if after is not None:
        if after not in ids:
            raise InvalidRequest.at("after", f"no item {after!r} is listed")
        start = ids.index(after) + 1
    page = list(items[start : start + limit])
    return ItemList(
        object_="list",
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=start + limit < len(items),
    )
