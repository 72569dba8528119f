"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import flask
import msgspec
from flask import Blueprint, Response, g, request

from gateway.api.anthropic import requests
from gateway.api.anthropic.envelope import AnthropicEnvelope, encode
from gateway.api.anthropic.model_limits import clamp_to_model
from gateway.api.anthropic.stream import PING, EventWriter
from gateway.api.anthropic.translate import MessagesTranslation, translate
from gateway.api.anthropic.whole import whole_message
from gateway.api.openai.checks import ignored_fields
from gateway.api.openai.prepare import Preparation, Prompt
from gateway.context import RequestContext
from gateway.formats.events import OutputWarning
from gateway.generation import run
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
    with translation.renaming():
        model = service.model(translation.chat.model)
        run.raise_cached_refusal(service)
        preparation, prompt, warnings = _prepare(service, translation, model)
        prompt_request = preparation.prompt_request(prompt)
        envelope = _envelope(preparation, prompt, translation, warnings)
        options = run.RequestOptions.of(body, envelope.id)
        try:
            if body.stream:
                return run.stream(
                    service,
                    [prompt_request],
                    options,
                    lambda group, outlet: _writer(group, outlet, envelope),
                )
            group, collected = run.whole(service, [prompt_request], options)
        except RequestError as error:
            raise preparation.rename_field(error) from None
    return _json(whole_message(group, collected.whole[0].events, envelope))


def count(service: Service) -> Response:
    """Count the prompt tokens of a request."""
    body = _read(service, requests.count_decoder)
    translation = _translated(body)
    with translation.renaming():
        model = service.model(translation.chat.model)
        _, prompt, _ = _prepare(service, translation, model)
    count: dict[str, Any] = {"input_tokens": len(prompt.ids), **_extensions(body, prompt)}
    return _json(encode(count))


def _read(service: Service, decoder: msgspec.json.Decoder[Body]) -> Body:
    body, g.ignored = service.bodies.parse_known(request, decoder)
    return body


def _translated(body: requests.CountBody) -> MessagesTranslation:
    translation = translate(body)
    g.ignored = ignored_fields(g.ignored, translation.chat)
    return translation


def _prepare(
    service: Service, translation: MessagesTranslation, model: ServedModel
) -> tuple[Preparation, Prompt, list[OutputWarning]]:
    chat, warnings = clamp_to_model(
        translation.chat, g.caller.context_limit(model.limits.max_len), model.output_format
    )
    trusts = service.config.trust_request_chat_template
    preparation = Preparation(chat, model, trusts_template=trusts)
    g.ignored = ignored_fields(
        [*g.ignored, *map(translation.request_path, preparation.ignored)], chat
    )
    with g.context.journal.tokenizing():
        prompt = preparation.prompt(chat.messages)
    return preparation, prompt, warnings


def _envelope(
    preparation: Preparation,
    prompt: Prompt,
    translation: MessagesTranslation,
    warnings: Sequence[OutputWarning],
) -> AnthropicEnvelope:
    context: RequestContext = g.context
    chat, limits = translation.chat, preparation.model.limits
    return AnthropicEnvelope(
        context.request_id,
        chat.model or preparation.model.names[0],
        shows_thinking=translation.shows_thinking,
        extensions=_extensions(chat, prompt),
        warnings=[*translation.warnings, *warnings],
        block_tokens=limits.block_tokens if limits.prefix_cache else 0,
    )


def _extensions(body: Any, prompt: Prompt) -> dict[str, Any]:
    extensions: dict[str, Any] = {}
    if g.ignored:
        extensions["ignored_params"] = g.ignored
    if body.return_effective_kwargs:
        extensions["effective"] = prompt.effective
    return extensions


def _writer(group: ChoiceGroup, outlet: Outlet, envelope: AnthropicEnvelope) -> EventWriter:
    return EventWriter(
        group,
        envelope,
        write=outlet.write,
        finish=outlet.finish,
        on_start=lambda: outlet.set_keep_alive(PING),
    )


def _json(body: bytes) -> Response:
    return flask.Response(body, content_type="application/json")
