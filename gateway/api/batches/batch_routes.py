"""The routes of batches: create, list, get and cancel. The batches of another owner are reported as
not found."""

from __future__ import annotations

import time

import msgspec
from flask import Response, request

from gateway.api.batches.file_routes import (
    file_store,
    listed,
    refuse_if_full,
)
from gateway.api.batches.requests import BatchCreateBody
from gateway.api.batches.responses import BatchList, BatchObject, batch_list, batch_object
from gateway.api.openai.responses import ErrorAnswer
from gateway.context import RequestContext
from gateway.http.errors import NoSuchId
from gateway.http.query import whole_number
from gateway.http.route import INFERENCE, Parameter, Routes, json_response
from gateway.service import Service
from gateway.store.batch_database import TooMany, new_id
from gateway.store.batch_queries import NewBatch, StoredBatch
from gateway.store.batch_states import CannotCancel
from gateway.store.runs import DAY_S
from protocol.wire.errors import InvalidRequest

routes = Routes("Files and batches", ErrorAnswer, scope="inference")
ONE = "/v1/batches/<batch_id>"
ID = Parameter("batch_id", "The id of a batch.", place="path")
STORED = (400, 404, 405, 500, 503)
DEFAULT_LIST, MAX_LIST = 20, 100


@routes.post(
    "/v1/batches",
    about="Create a batch: compute all lines of an uploaded file in the background.",
    takes=(BatchCreateBody,),
    gives=BatchObject,
    statuses=INFERENCE,
)
def create(service: Service, context: RequestContext) -> Response:
    store, config = file_store(service), service.config
    body = service.bodies.parse(request, BatchCreateBody)
    now, expiry = time.time(), body.output_expires_after
    new = NewBatch(
        id=new_id("batch_"),
        owner=context.caller.owner,
        caller=context.caller.name,
        endpoint=body.endpoint,
        input_file=body.input_file_id,
        output_file=new_id("file-"),
        error_file=new_id("file-"),
        window=body.completion_window,
        metadata=msgspec.json.encode(body.metadata),
        output_s=config.file_days * DAY_S if expiry is None else float(expiry.seconds),
        expires_at=now + body.window_s,
    )
    try:
        with refuse_if_full():
            batch = store.call(lambda db: db.create_batch(new, config.batches_per_key, now))
    except TooMany as error:
        raise InvalidRequest(
            f"at most {error.limit:,} open batches; wait until one has ended "
            "(see --batches-per-key)"
        ) from None
    if batch is None:
        raise InvalidRequest.at(
            "input_file_id", "no stored file with the purpose batch has this id"
        )
    _wake(service)
    return json_response(batch_object(batch))


_INT = {"type": "integer", "minimum": 1, "maximum": MAX_LIST}


@routes.get(
    "/v1/batches",
    about="List the batches, the newest first.",
    gives=BatchList,
    statuses=STORED,
    parameters=(
        Parameter("limit", f"Maximum number of batches; by default {DEFAULT_LIST}.", schema=_INT),
        Parameter("after", "List the batches after this id."),
    ),
)
def batches(service: Service, context: RequestContext) -> Response:
    limit = whole_number("limit", default=DEFAULT_LIST, least=1, most=MAX_LIST)
    owner, after = context.caller.owner, request.args.get("after")
    found = listed(file_store(service), lambda db: db.list_batches(owner, after, limit + 1))
    return json_response(batch_list(found, limit))


@routes.get(ONE, about="Describe a batch.", gives=BatchObject, statuses=STORED, parameters=(ID,))
def read(service: Service, context: RequestContext, batch_id: str) -> Response:
    return json_response(batch_object(_batch(service, context, batch_id)))


@routes.post(
    f"{ONE}/cancel",
    about="Cancel a batch.\nIt is `cancelling` until its open lines have been aborted. Then it is "
    "`cancelled`, and its files have the results so far.",
    gives=BatchObject,
    statuses=STORED,
    parameters=(ID,),
)
def cancel(service: Service, context: RequestContext, batch_id: str) -> Response:
    owner, now = context.caller.owner, time.time()
    try:
        with refuse_if_full():
            file_store(service).call(lambda db: db.cancel_batch(batch_id, owner, now))
    except CannotCancel as error:
        raise InvalidRequest.at("batch_id", str(error)) from None
    _wake(service)
    return json_response(batch_object(_batch(service, context, batch_id)))


def _batch(service: Service, context: RequestContext, batch_id: str) -> StoredBatch:
    owner = context.caller.owner
    batch = file_store(service).call(lambda db: db.get_batch(batch_id, owner))
    if batch is None:
        raise NoSuchId.of("batch_id", "the id of a stored batch", batch_id)
    return batch


def _wake(service: Service) -> None:
    for work in service.background:
        work.wake()
