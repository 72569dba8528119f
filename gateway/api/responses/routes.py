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

from gateway.api.openai.checks import listed
from gateway.api.responses.checks import check, ignored
from gateway.api.responses.events import ResponseEvents
from gateway.api.responses.frame_writers import (
    Keep,
    RunFrameWriter,
    StreamFrameWriter,
    WholeResponseWriter,
)
from gateway.api.responses.history import History
from gateway.api.responses.items import RESPONSE_PREFIX, PlacedItem, identified
from gateway.api.responses.rendering import Rendered, rendered
from gateway.api.responses.requests import ResponsesBody, responses_decoder
from gateway.api.responses.response import ResponseHead, Told, fields_of
from gateway.api.responses.responses import ResponseInputTokens
from gateway.api.responses.stream import FrameWriter, LogprobsShown, ResponseSink
from gateway.generation import run as any_api
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
    keeps = _keeps(service, body)
    items, before = history_of(service).items_of(body)
    model = service.model(body.model)
    any_api.knock(service)
    ready = _rendered(service, body, [*before, *items], model)
    ask = ready.ask()
    head = _head(body, ready, ask, stores=keeps)
    record = _record(head, items) if keeps else None
    with ready.named():
        return _respond(service, _Created(body, ready, ask, head, record))


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
    with g.exchange.journal.tokenizing():
        trusts = service.config.trust_request_chat_template
        ready = rendered(body, items, model, trusts_template=trusts)
    g.ignored = listed([*g.ignored, *ready.ignored], ready.translation.chat)
    return ready


def _read(service: Service) -> ResponsesBody:
    body, unknown = service.bodies.parse_known(request, responses_decoder)
    g.ignored = ignored(body, unknown)
    check(body)
    return body


def _keeps(service: Service, body: ResponsesBody) -> bool:
    """Return whether to store the response. Raise InvalidRequest if the body requires storage and
    the server has none."""
    can = service.keeping is not None
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
    store = service.keeping.store if service.keeping else None
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
        body=msgspec.json.encode(head.told("queued")),
    )


@dataclass(frozen=True, slots=True)
class _Created:
    """A response about to be generated. `record` is None if it is not stored."""

    body: ResponsesBody
    ready: Rendered
    ask: PromptRequest
    head: ResponseHead
    record: StoredRecord | None

    @property
    def terms(self) -> any_api.RequestOptions:
        return any_api.RequestOptions.of(self.body, self.head.id)

    def sink(
        self, answer: ChoiceGroup, taker: FrameWriter, *, queued: bool = False
    ) -> ResponseSink:
        events = ResponseEvents(self.head, seals=self.body.tells_encrypted)
        logprobs = None
        if self.body.tells_logprobs:
            tokenizer = self.ready.preparation.model.tokenizer
            logprobs = LogprobsShown(tokenizer, self.body.top_logprobs or 0)
        return ResponseSink(answer, events, taker, logprobs, queued=queued)


def _respond(service: Service, created: _Created) -> Response:
    keep = _keep(service, created.record)
    if created.body.background:
        return _in_background(service, created)
    if created.body.stream:
        return any_api.stream(
            service,
            [created.ask],
            created.terms,
            lambda answer, outlet: created.sink(answer, StreamFrameWriter(outlet, keep)),
        )
    taker = WholeResponseWriter()
    any_api.heard(service, [created.ask], created.terms, lambda answer: created.sink(answer, taker))
    return _json(keep(taker.response) if keep else taker.response)


def _keep(service: Service, record: StoredRecord | None) -> Keep | None:
    """Return a function that stores the final response; None if it is not stored."""
    keeping = service.keeping
    if keeping is None or record is None:
        return None

    def keep(response: Told) -> Told:
        kept = msgspec.structs.replace(record, body=msgspec.json.encode(response))
        try:
            keeping.store.ask(lambda database: database.put(kept, time.time()))
        except sqlite3.Error:  # the response is sent anyway
            log.exception("could not store a response")
            return response | {"store": False}
        return response

    return keep


def _in_background(service: Service, created: _Created) -> Response:
    """Generate the response whether or not its client stays connected."""
    keeping, record = service.keeping, created.record
    assert keeping is not None
    assert record is not None
    runs: list[DetachedRun] = []

    def sink_of(answer: ChoiceGroup) -> ResponseSink:
        run = keeping.runs.begin(NewRun(record.id, record.owner, RESPONSE), record)
        runs.append(run)
        sink = created.sink(answer, RunFrameWriter(run), queued=True)
        run.abort = partial(_cancel, answer, sink)
        return sink

    any_api.detached(service, [created.ask], created.terms, sink_of)
    (run,) = runs
    if created.body.stream:
        return any_api.listening(service, run, owns_exchange=False)
    run.leave()
    return flask.Response(record.body, content_type="application/json")


def _cancel(answer: ChoiceGroup, sink: ResponseSink) -> None:
    answer.finish = "cancelled"
    sink.cancel()
    answer.close()


def _head(
    body: ResponsesBody, ready: Rendered, ask: PromptRequest, *, stores: bool
) -> ResponseHead:
    model = ready.preparation.model
    asides: dict[str, Any] = {}
    if g.ignored:
        asides["ignored_params"] = g.ignored
    if body.return_effective_kwargs:
        asides["effective"] = ready.prompt.effective
    (params,) = ask.choices
    fields = fields_of(
        body,
        params,
        model=body.model or model.names[0],
        fingerprint=model.fingerprint,
        stores=stores,
        asides=asides,
    )
    return ResponseHead(RESPONSE_PREFIX + uuid.uuid4().hex, fields)


def _json(value: Any) -> Response:
    return flask.Response(msgspec.json.encode(value), content_type="application/json")
