"""The routes of the Responses API: create, count tokens, and get, delete or cancel a stored
response.

A stored response of another owner is reported as not found.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import gevent
import msgspec
from flask import Response, request

from gateway.api.openai.field_paths import ignored_fields
from gateway.api.openai.responses import ErrorAnswer
from gateway.api.responses.events import ResponseEvents
from gateway.api.responses.history import UNFINISHED, History, body_of, input_of
from gateway.api.responses.items import Item, PlacedItem, with_ids
from gateway.api.responses.requests import ResponsesBody, check, fields_without_effect
from gateway.api.responses.responses import (
    ItemList,
    ResponseDeleted,
    ResponseEvent,
    ResponseInputTokens,
    ResponseObject,
    new_response,
)
from gateway.api.responses.stream import (
    FrameWriter,
    ResponseSink,
    RunFrameWriter,
    StreamFrameWriter,
    TextLogprobs,
    WholeResponseWriter,
)
from gateway.api.responses.translate import Rendered, rendered
from gateway.context import RequestContext
from gateway.generation.group import ChoiceGroup
from gateway.generation.job import Job, RequestOptions
from gateway.http.errors import NoSuchId
from gateway.http.query import choice, whole_number
from gateway.http.route import Parameter, Routes, Stream, json_response
from gateway.served_model import ServedModel
from gateway.service import Service
from gateway.store.database import LEASE_S
from gateway.store.queries import NewRun, StoredRecord
from gateway.store.resume import RunTail
from gateway.store.runs import RESPONSE, DetachedRun, Persistence
from gateway.store.uploaded_images import UploadedImages
from protocol.wire.errors import InvalidRequest

log = logging.getLogger(__name__)


routes = Routes("Responses", ErrorAnswer, scope="inference")


@routes.post(
    "/v1/responses",
    about="Create a response.",
    takes=(ResponsesBody,),
    gives=ResponseObject,
    streams=Stream(ResponseEvent),
)
def create(service: Service, context: RequestContext) -> Response:
    body = _read(service, context)
    stores = _is_stored(service, body)
    items, before = history_of(service, context).read_items(body)
    use = service.use(context, body.model, body)
    model = use.model
    ready = _rendered(service, context, body, [*before, *items], model)
    prompt_request = ready.prompt_request()
    (params,) = prompt_request.choices
    response = new_response(
        body,
        params,
        model=body.model or model.names[0],
        fingerprint=model.fingerprint,
        stores=stores,
        extensions=context.extensions(
            ready.prompt.effective if body.return_effective_kwargs else None
        ),
    )
    record = _record(context, response, items) if stores else None
    job = Job(use, context, [prompt_request], RequestOptions.from_body(body, response.id))
    with ready.translate_errors():
        return _Creation(service, job, body, ready, response, record).respond()


@routes.post(
    "/v1/responses/input_tokens",
    about="Count the prompt tokens of a request.",
    takes=(ResponsesBody,),
    gives=ResponseInputTokens,
)
def input_tokens(service: Service, context: RequestContext) -> Response:
    body = _read(service, context)
    items, before = history_of(service, context).read_items(body)
    model = service.use(context, body.model).model
    ready = _rendered(service, context, body, [*before, *items], model)
    count = len(ready.prompt.ids)
    return json_response(ResponseInputTokens(object_="response.input_tokens", input_tokens=count))


def _rendered(
    service: Service,
    context: RequestContext,
    body: ResponsesBody,
    items: Sequence[PlacedItem],
    model: ServedModel,
) -> Rendered:
    with context.timeline.tokenizing():
        trusts = service.config.trust_request_chat_template
        files = UploadedImages(service.files, context.caller.owner)
        ready = rendered(body, items, model, trusts_template=trusts, files=files)
    context.timeline.note_prompts([ready.prompt])
    context.ignored = ignored_fields([*context.ignored, *ready.ignored], body.strict_params)
    return ready


def _read(service: Service, context: RequestContext) -> ResponsesBody:
    body, unknown = service.bodies.parse_known(request, ResponsesBody)
    context.ignored = fields_without_effect(body, unknown)
    check(body)
    return body


def _is_stored(service: Service, body: ResponsesBody) -> bool:
    """Return whether to store the response. Raise InvalidRequest if the body requires this and the
    server stores no responses."""
    can = service.persistence is not None
    for field in ("store", "background"):
        if getattr(body, field) and not can:
            raise InvalidRequest.at(field, "this server stores no responses (see --response-store)")
    if body.background and body.store is False:
        raise InvalidRequest.at("background", "requires store to be true")
    return can and body.store is not False


def history_of(service: Service, context: RequestContext) -> History:
    """Return the reader of the stored responses that the caller may continue."""
    store = service.persistence.store if service.persistence else None
    return History(store, context.caller.owner)


def _record(
    context: RequestContext, response: ResponseObject, items: Sequence[PlacedItem]
) -> StoredRecord:
    """Return the record to store when the response starts."""
    own = with_ids([placed.item for placed in items], response.id)
    return StoredRecord(
        response.id,
        context.caller.owner,
        response.created_at,
        response.previous_response_id,
        input=msgspec.json.encode(own),
        body=msgspec.json.encode(response),
    )


@dataclass(frozen=True, slots=True)
class _Creation:
    """Generates a queued response. `record` is None if the response is not stored."""

    service: Service
    job: Job
    body: ResponsesBody
    ready: Rendered
    response: ResponseObject
    record: StoredRecord | None

    def respond(self) -> Response:
        if self.body.background:
            return self._in_background()
        if self.body.stream:
            return self.service.runner.stream(
                self.job,
                lambda group, outlet: self._sink(group, StreamFrameWriter(outlet, self._store)),
            )
        frame_writer = WholeResponseWriter()
        self.service.runner.run_to_end(self.job, lambda group: self._sink(group, frame_writer))
        return json_response(self._store(frame_writer.response))

    def _in_background(self) -> Response:
        """Generate the response even if its client disconnects."""
        persistence, record, runner = self.service.persistence, self.record, self.service.runner
        assert persistence is not None
        assert record is not None
        runs: list[DetachedRun] = []

        def make_sink(group: ChoiceGroup) -> ResponseSink:
            detached = persistence.runs.start(NewRun(record.id, record.owner, RESPONSE), record)
            runs.append(detached)
            sink = self._sink(group, RunFrameWriter(detached), queued=True)
            detached.abort = partial(_cancel, group, sink)
            return sink

        runner.detached(self.job, make_sink)
        (detached,) = runs
        if self.body.stream:
            return runner.stream_from(self.job.context, detached, owns_context=False)
        detached.detach()
        return json_response(record.body)

    def _sink(
        self, group: ChoiceGroup, frame_writer: FrameWriter, *, queued: bool = False
    ) -> ResponseSink:
        translation = self.ready.translation
        events = ResponseEvents(
            self.response,
            seals=self.body.includes_encrypted,
            summarizes=self.body.summary is not None,
            tools=translation.tools,
            warnings=[*translation.warnings, *self.ready.prompt.warnings],
        )
        logprobs = None
        if self.body.includes_logprobs:
            tokenizer = self.ready.preparation.model.tokenizer
            logprobs = TextLogprobs(tokenizer, self.body.top_logprobs or 0)
        return ResponseSink(group, events, frame_writer, logprobs, queued=queued)

    def _store(self, response: ResponseObject) -> ResponseObject:
        """Store the final response if it has a record. Return the response to send, whose `store`
        is false if it could not be stored."""
        persistence, record = self.service.persistence, self.record
        if persistence is None or record is None:
            return response
        final = msgspec.structs.replace(record, body=msgspec.json.encode(response))
        try:
            persistence.store.call(lambda database: database.put(final, time.time()))
        except sqlite3.Error as error:  # the response is sent anyway
            log.warning("could not store a response: %s", error)
            return msgspec.structs.replace(response, store=False)
        return response


def _cancel(group: ChoiceGroup, sink: ResponseSink) -> None:
    group.finish = "cancelled"
    sink.cancel()
    group.close()


# ---- stored responses

CANCEL_POLL_S = 0.05
_TRUE = ("true", "1")
ONE = "/v1/responses/<response_id>"
ID = Parameter("response_id", "The id of a stored response.", place="path")
STORED = (400, 404, 405, 500, 503)
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
    after = whole_number("starting_after", default=-1, least=0, most=1 << 62)
    tail = RunTail(persistence.store, record.id, record.owner, after, persistence.window_s)
    return service.runner.stream_from(context, tail)


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
    """Cancel a background response, whichever process runs it. Wait until it has ended, and return
    it. A response that has ended already is returned unchanged. Raise InvalidRequest if the
    response does not run in the background."""
    persistence, record = _stored(service, context, response_id)
    if not body_of(record)["background"]:
        raise InvalidRequest(f"{response_id}: only a background response can be cancelled")
    if body_of(record)["status"] in UNFINISHED:
        persistence.store.call(lambda database: database.cancel(record.id, record.owner))
        persistence.runs.abort(record.id)
        record = _await_end(persistence, record)
    return json_response(record.body)


def _await_end(persistence: Persistence, record: StoredRecord) -> StoredRecord:
    """Wait at most 2 * LEASE_S seconds for the stored response to end, and return its record.

    The process that runs the response stores the end. If that process died, another process marks
    the response as interrupted.
    """
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
    order = choice("order", ("asc", "desc"), default="desc")
    limit = whole_number("limit", default=20, least=1, most=100)
    items = input_of(record)
    return json_response(
        page_of(items if order == "asc" else items[::-1], limit, request.args.get("after"))
    )


def _stored(
    service: Service, context: RequestContext, response_id: str
) -> tuple[Persistence, StoredRecord]:
    persistence = service.persistence
    if persistence is None:
        raise NoSuchId(
            "response_id: this server stores no responses (see --response-store)",
            param="response_id",
        )
    return persistence, _get(persistence, response_id, context.caller.owner)


def _get(persistence: Persistence, response_id: str, owner: str) -> StoredRecord:
    record = persistence.store.call(lambda database: database.get(response_id, owner, time.time()))
    if record is None:
        raise NoSuchId.of("response_id", "the id of a stored response", response_id)
    return record


def page_of(items: Sequence[Item], limit: int, after: str | None) -> ItemList:
    """Return a page of at most `limit` items, starting after the item with the id `after`. Raise
    InvalidRequest if there is no such item."""
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
