"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import flask
import msgspec
from flask import Blueprint, Response, g, request

from gateway.api.anthropic import requests
from gateway.api.anthropic.envelope import AnthropicEnvelope, encode
from gateway.api.anthropic.model_limits import fitted
from gateway.api.anthropic.stream import PING, EventWriter
from gateway.api.anthropic.translate import MessagesTranslation, translate
from gateway.api.anthropic.whole import whole_message
from gateway.api.openai.checks import listed
from gateway.api.openai.prepare import Preparation, Prompt
from gateway.context import RequestContext
from gateway.formats.events import OutputWarning
from gateway.generation import run as any_api
from gateway.generation.group import ChoiceGroup
from gateway.http.client_socket import Outlet
from gateway.served_model import ServedModel
from gateway.service import Service
from protocol.errors import RequestError

Body = TypeVar("Body", bound=requests.CountBody)


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("anthropic", __name__)
    routes.post("/v1/messages", endpoint="messages")(lambda: messages(service))
    routes.post("/v1/messages/count_tokens", endpoint="count_tokens")(lambda: count(service))
    return routes


def messages(service: Service) -> Response:
    body = _read(service, requests.messages_decoder)
    translation = _translated(body)
    with translation.named():
        model = service.model(translation.chat.model)
        any_api.knock(service)
        preparation, prompt, warnings = _prepare(service, translation, model)
        ask = preparation.ask(prompt)
        origin = _origin(preparation, prompt, translation, warnings)
        terms = any_api.RequestOptions.of(body, origin.id)
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
    """Count the prompt tokens of a request."""
    body = _read(service, requests.count_decoder)
    translation = _translated(body)
    with translation.named():
        model = service.model(translation.chat.model)
        _, prompt, _ = _prepare(service, translation, model)
    told: dict[str, Any] = {"input_tokens": len(prompt.ids), **_asides(body, prompt)}
    return _json(encode(told))


def _read(service: Service, decoder: msgspec.json.Decoder[Body]) -> Body:
    body, g.ignored = service.bodies.parse_known(request, decoder)
    return body


def _translated(body: requests.CountBody) -> MessagesTranslation:
    translation = translate(body)
    g.ignored = listed(g.ignored, translation.chat)
    return translation


def _prepare(
    service: Service, translation: MessagesTranslation, model: ServedModel
) -> tuple[Preparation, Prompt, list[OutputWarning]]:
    chat, warnings = fitted(
        translation.chat, g.caller.context_limit(model.limits.max_len), model.reading
    )
    trusts = service.config.trust_request_chat_template
    preparation = Preparation(chat, model, trusts_template=trusts)
    g.ignored = listed([*g.ignored, *map(translation.own_name, preparation.ignored)], chat)
    with g.exchange.journal.tokenizing():
        prompt = preparation.prompt(chat.messages)
    return preparation, prompt, warnings


def _origin(
    preparation: Preparation,
    prompt: Prompt,
    translation: MessagesTranslation,
    warnings: Sequence[OutputWarning],
) -> AnthropicEnvelope:
    exchange: RequestContext = g.exchange
    chat, limits = translation.chat, preparation.model.limits
    return AnthropicEnvelope(
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


def _writer(answer: ChoiceGroup, outlet: Outlet, origin: AnthropicEnvelope) -> EventWriter:
    return EventWriter(
        answer,
        origin,
        write=outlet.write,
        finish=outlet.finish,
        on_start=lambda: outlet.keep_alive_with(PING),
    )


def _json(body: bytes) -> Response:
    return flask.Response(body, content_type="application/json")
