"""POST /v1/responses. What is asked is translated, asked as a chat is, and told as typed events."""

from __future__ import annotations

import uuid
from typing import Any

import flask
import msgspec
from flask import Blueprint, Response, g, request

from gateway import respond as any_api
from gateway.answering import Answer, Ask
from gateway.body import decode, read_json, unknown_fields
from gateway.connection import Outlet
from gateway.openai.checks import check_ignored
from gateway.responses.checks import check, ignored
from gateway.responses.events import ResponseEvents
from gateway.responses.items import RESPONSE_PREFIX, input_items
from gateway.responses.rendering import Rendered, rendered
from gateway.responses.response import Head, fields_of
from gateway.responses.schema import ResponsesBody, responses_decoder
from gateway.responses.stream import LogprobsShown, ResponseSink, Taker
from gateway.responses.takers import StreamTaker, WholeTaker
from gateway.service import Service


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("responses", __name__)
    routes.post("/v1/responses", endpoint="create")(lambda: create(service))
    return routes


def create(service: Service) -> Response:
    body = _read(service)
    items = input_items(body.input)
    trusts = service.config.trust_request_chat_template
    ready = rendered(body, items, service.model(body.model), trusts_template=trusts)
    check_ignored(g.ignored, ready.translation.chat)
    with ready.named():
        return _respond(service, body, ready)


def _read(service: Service) -> ResponsesBody:
    data = read_json(request, service.config.max_body_mib << 20)
    body = decode(data, responses_decoder)
    g.ignored = ignored(body, unknown_fields(data, ResponsesBody))
    check(body)
    return body


def _respond(service: Service, body: ResponsesBody, ready: Rendered) -> Response:
    ask = ready.ask()
    head = _head(body, ready, ask)
    events = ResponseEvents(head, seals=body.tells_encrypted)
    logprobs = _logprobs(body, ready)
    terms = any_api.Terms(
        namespace=body.cache_salt or "", priority=body.priority or 0, label=head.id
    )

    def sink(answer: Answer, taker: Taker) -> ResponseSink:
        return ResponseSink(answer, events, taker, logprobs)

    def streaming(answer: Answer, outlet: Outlet) -> ResponseSink:
        return sink(answer, StreamTaker(outlet, lambda _: None))

    if body.stream:
        return any_api.stream(service, [ask], terms, streaming)
    taker = WholeTaker()
    any_api.heard(service, [ask], terms, lambda answer: sink(answer, taker))
    return _json(taker.response)


def _head(body: ResponsesBody, ready: Rendered, ask: Ask) -> Head:
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
        stores=False,
        asides=asides,
    )
    return Head(RESPONSE_PREFIX + uuid.uuid4().hex, fields)


def _logprobs(body: ResponsesBody, ready: Rendered) -> LogprobsShown | None:
    if not body.tells_logprobs:
        return None
    return LogprobsShown(ready.preparation.model.tokenizer, body.top_logprobs or 0)


def _json(value: Any) -> Response:
    return flask.Response(msgspec.json.encode(value), content_type="application/json")
