"""POST /v1/responses: translates the request into a chat and writes typed events."""

from __future__ import annotations

import logging
import sqlite3
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import flask
import msgspec
from flask import Blueprint, Response, g, request

from gateway.api.openai.checks import ignored_fields
from gateway.api.responses.checks import check, fields_without_effect
from gateway.api.responses.events import ResponseEvents
from gateway.api.responses.frame_writers import (
    RunFrameWriter,
    StoreResponse,
    StreamFrameWriter,
    WholeResponseWriter,
)
from gateway.api.responses.history import History
from gateway.api.responses.items import RESPONSE_PREFIX, PlacedItem, identified
from gateway.api.responses.rendering import Rendered, rendered
from gateway.api.responses.requests import ResponsesBody, responses_decoder
from gateway.api.responses.response import Json, ResponseHead, fields_of
from gateway.api.responses.responses import ResponseInputTokens
from gateway.api.responses.stream import FrameWriter, ResponseSink, TextLogprobs
from gateway.generation import run
from gateway.generation.group import ChoiceGroup
from gateway.generation.request import PromptRequest
from gateway.served_model import ServedModel
from gateway.service import Service
from gateway.store.persistence import RESPONSE
from gateway.store.queries import NewRun, StoredRecord
from gateway.store.runs import DetachedRun
from protocol.errors import InvalidRequest

log = logging.getLogger(__name__)


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("responses", __name__)
    routes.post("/v1/responses", endpoint="create")(lambda: create(service))
    routes.post("/v1/responses/input_tokens", endpoint="input_tokens")(
        lambda: input_tokens(service)
    )
    return routes


def create(service: Service) -> Response:
    body = _read(service)
    is_stored = _is_stored(service, body)
    items, before = history_of(service).items_of(body)
    model = service.model(body.model)
    run.raise_cached_refusal(service)
    ready = _rendered(service, body, [*before, *items], model)
    prompt_request = ready.prompt_request()
    head = _head(body, ready, prompt_request, stores=is_stored)
    record = _record(head, items) if is_stored else None
    with ready.renaming():
        return _respond(service, _Created(body, ready, prompt_request, head, record))


def input_tokens(service: Service) -> Response:
    """Count the tokens of the prompt that a request with these fields would send."""
    body = _read(service)
    items, before = history_of(service).items_of(body)
    ready = _rendered(service, body, [*before, *items], service.model(body.model))
    count = len(ready.prompt.ids)
    return _json(ResponseInputTokens(object_="response.input_tokens", input_tokens=count))


def _rendered(
    service: Service, body: ResponsesBody, items: Sequence[PlacedItem], model: ServedModel
) -> Rendered:
    with g.context.journal.tokenizing():
        trusts = service.config.trust_request_chat_template
        ready = rendered(body, items, model, trusts_template=trusts)
    g.ignored = ignored_fields([*g.ignored, *ready.ignored], ready.translation.chat)
    return ready


def _read(service: Service) -> ResponsesBody:
    body, unknown = service.bodies.parse_known(request, responses_decoder)
    g.ignored = fields_without_effect(body, unknown)
    check(body)
    return body


def _is_stored(service: Service, body: ResponsesBody) -> bool:
    """Return whether to store the response. Raise InvalidRequest if the body requires storage and
    the server has none."""
    can = service.persistence is not None
    for field in ("store", "background"):
        if getattr(body, field) and not can:
            raise InvalidRequest(
                f"{field}: this server stores no responses (see --response-store)", param=field
            )
    if body.background and body.store is False:
        raise InvalidRequest("background: requires store to be true", param="background")
    return can and body.store is not False


def history_of(service: Service) -> History:
    """Return the stored responses that the current caller may continue."""
    store = service.persistence.store if service.persistence else None
    return History(store, g.caller.owner)


def _record(head: ResponseHead, items: Sequence[PlacedItem]) -> StoredRecord:
    """Return the record to store when the response starts."""
    own = identified([placed.item for placed in items], head.id)
    return StoredRecord(
        head.id,
        g.caller.owner,
        head.created_at,
        head.fields["previous_response_id"],
        input=msgspec.json.encode(own),
        body=msgspec.json.encode(head.response("queued")),
    )


@dataclass(frozen=True, slots=True)
class _Created:
    """A response about to be generated. `record` is None if it is not stored."""

    body: ResponsesBody
    ready: Rendered
    prompt_request: PromptRequest
    head: ResponseHead
    record: StoredRecord | None

    @property
    def options(self) -> run.RequestOptions:
        return run.RequestOptions.of(self.body, self.head.id)

    def sink(
        self, group: ChoiceGroup, frame_writer: FrameWriter, *, queued: bool = False
    ) -> ResponseSink:
        events = ResponseEvents(self.head, seals=self.body.includes_encrypted)
        logprobs = None
        if self.body.includes_logprobs:
            tokenizer = self.ready.preparation.model.tokenizer
            logprobs = TextLogprobs(tokenizer, self.body.top_logprobs or 0)
        return ResponseSink(group, events, frame_writer, logprobs, queued=queued)


def _respond(service: Service, created: _Created) -> Response:
    store_response = _store_function(service, created.record)
    if created.body.background:
        return _in_background(service, created)
    if created.body.stream:
        return run.stream(
            service,
            [created.prompt_request],
            created.options,
            lambda group, outlet: created.sink(group, StreamFrameWriter(outlet, store_response)),
        )
    frame_writer = WholeResponseWriter()
    run.run_to_end(
        service,
        [created.prompt_request],
        created.options,
        lambda group: created.sink(group, frame_writer),
    )
    return _json(store_response(frame_writer.response) if store_response else frame_writer.response)


def _store_function(service: Service, record: StoredRecord | None) -> StoreResponse | None:
    """Return a function that stores the final response; None if it is not stored."""
    persistence = service.persistence
    if persistence is None or record is None:
        return None

    def store_response(response: Json) -> Json:
        final = msgspec.structs.replace(record, body=msgspec.json.encode(response))
        try:
            persistence.store.call(lambda database: database.put(final, time.time()))
        except sqlite3.Error:  # the response is sent anyway
            log.exception("could not store a response")
            return response | {"store": False}
        return response

    return store_response


def _in_background(service: Service, created: _Created) -> Response:
    """Generate the response whether or not its client stays connected."""
    persistence, record = service.persistence, created.record
    assert persistence is not None
    assert record is not None
    runs: list[DetachedRun] = []

    def make_sink(group: ChoiceGroup) -> ResponseSink:
        detached = persistence.runs.start(NewRun(record.id, record.owner, RESPONSE), record)
        runs.append(detached)
        sink = created.sink(group, RunFrameWriter(detached), queued=True)
        detached.abort = partial(_cancel, group, sink)
        return sink

    run.detached(service, [created.prompt_request], created.options, make_sink)
    (detached,) = runs
    if created.body.stream:
        return run.listening(service, detached, owns_exchange=False)
    detached.leave()
    return flask.Response(record.body, content_type="application/json")


def _cancel(group: ChoiceGroup, sink: ResponseSink) -> None:
    group.finish = "cancelled"
    sink.cancel()
    group.close()


def _head(
    body: ResponsesBody, ready: Rendered, prompt_request: PromptRequest, *, stores: bool
) -> ResponseHead:
    model = ready.preparation.model
    extensions: dict[str, Any] = {}
    if g.ignored:
        extensions["ignored_params"] = g.ignored
    if body.return_effective_kwargs:
        extensions["effective"] = ready.prompt.effective
    (params,) = prompt_request.choices
    fields = fields_of(
        body,
        params,
        model=body.model or model.names[0],
        fingerprint=model.fingerprint,
        stores=stores,
        extensions=extensions,
    )
    return ResponseHead(RESPONSE_PREFIX + uuid.uuid4().hex, fields)


def _json(value: Any) -> Response:
    return flask.Response(msgspec.json.encode(value), content_type="application/json")
