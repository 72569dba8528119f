"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import flask
import msgspec
from flask import Blueprint, Response, g, request

from gateway import respond as any_api
from gateway.answering import Answer
from gateway.anthropic import schema
from gateway.anthropic.fitting import fitted
from gateway.anthropic.shapes import Origin, encode
from gateway.anthropic.stream import PING, EventWriter
from gateway.anthropic.translate import Translation, translate
from gateway.anthropic.whole import whole_message
from gateway.connection import Outlet
from gateway.exchange import Exchange
from gateway.openai.checks import listed
from gateway.openai.prepare import Preparation, Prompt
from gateway.output.events import Warning
from gateway.served import ServedModel
from gateway.service import Service
from protocol.errors import RequestError

Body = TypeVar("Body", bound=schema.CountBody)


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("anthropic", __name__)
    routes.post("/v1/messages", endpoint="messages")(lambda: messages(service))
    routes.post("/v1/messages/count_tokens", endpoint="count_tokens")(lambda: count(service))
    return routes


def messages(service: Service) -> Response:
    body = _read(service, schema.messages_decoder)
    translation = _translated(body)
    with translation.named():
        model = service.model(translation.chat.model)
        any_api.knock(service)
        preparation, prompt, warnings = _prepare(service, translation, model)
        ask = preparation.ask(prompt)
        origin = _origin(preparation, prompt, translation, warnings)
        terms = any_api.Terms.of(body, origin.id)
        try:
            if body.stream:
                return any_api.stream(
                    service,
                    [ask],
                    terms,
                    lambda answer, outlet: _writer(answer, outlet, origin),
                )
            answer, fold = any_api.whole(service, [ask], terms)
        except RequestError as error:
            raise preparation.named(error) from None
    return _json(whole_message(answer, fold.whole[0].events, origin))


def count(service: Service) -> Response:
    """What a request with these fields would cost."""
    body = _read(service, schema.count_decoder)
    translation = _translated(body)
    with translation.named():
        model = service.model(translation.chat.model)
        _, prompt, _ = _prepare(service, translation, model)
    told: dict[str, Any] = {"input_tokens": len(prompt.ids), **_asides(body, prompt)}
    return _json(encode(told))


def _read(service: Service, decoder: msgspec.json.Decoder[Body]) -> Body:
    body, g.ignored = service.bodies.parse_known(request, decoder)
    return body


def _translated(body: schema.CountBody) -> Translation:
    translation = translate(body)
    g.ignored = listed(g.ignored, translation.chat)
    return translation


def _prepare(
    service: Service, translation: Translation, model: ServedModel
) -> tuple[Preparation, Prompt, list[Warning]]:
    chat, warnings = fitted(translation.chat, g.caller.longest(model.limits.max_len), model.reading)
    trusts = service.config.trust_request_chat_template
    preparation = Preparation(chat, model, trusts_template=trusts)
    g.ignored = listed([*g.ignored, *map(translation.own_name, preparation.ignored)], chat)
    with g.exchange.journal.tokenizing():
        prompt = preparation.prompt(chat.messages)
    return preparation, prompt, warnings


def _origin(
    preparation: Preparation, prompt: Prompt, translation: Translation, warnings: Sequence[Warning]
) -> Origin:
    exchange: Exchange = g.exchange
    chat, limits = translation.chat, preparation.model.limits
    return Origin(
        exchange.request_id,
        chat.model or preparation.model.names[0],
        shows_thinking=translation.shows_thinking,
        asides=_asides(chat, prompt),
        warnings=[*translation.warnings, *warnings],
        block_tokens=limits.block_tokens if limits.prefix_cache else 0,
    )


def _asides(body: Any, prompt: Prompt) -> dict[str, Any]:
    asides: dict[str, Any] = {}
    if g.ignored:
        asides["ignored_params"] = g.ignored
    if body.return_effective_kwargs:
        asides["effective"] = prompt.effective
    return asides


def _writer(answer: Answer, outlet: Outlet, origin: Origin) -> EventWriter:
    return EventWriter(
        answer,
        origin,
        write=outlet.write,
        finish=outlet.finish,
        on_start=lambda: outlet.keep_alive_with(PING),
    )


def _json(body: bytes) -> Response:
    return flask.Response(body, content_type="application/json")
