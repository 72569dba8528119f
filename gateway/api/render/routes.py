"""The render routes of all APIs, and the derender routes of chats and completions.

They do not use the engine.
"""

from __future__ import annotations

from typing import Any, TypeVar

import flask
import msgspec
from flask import Blueprint, Response, g, request

from gateway.api.anthropic.model_limits import clamp_to_model
from gateway.api.anthropic.requests import messages_decoder
from gateway.api.anthropic.translate import translate
from gateway.api.openai import checks, requests
from gateway.api.openai.completion import Completion
from gateway.api.openai.prepare import Preparation, Prompt
from gateway.api.render.bodies import ChatDerendering, CompletionDerendering
from gateway.api.render.render import rendered_chat, rendered_completion
from gateway.api.render.requests import (
    Carried,
    carried_decoder,
    derender_chat_decoder,
    derender_completion_decoder,
)
from gateway.api.responses.checks import check, fields_without_effect
from gateway.api.responses.rendering import rendered
from gateway.api.responses.requests import responses_decoder
from gateway.api.responses.routes import history_of
from gateway.context import RequestContext
from gateway.generation.parameters import check_counts
from gateway.http.body import decode, unknown_fields
from gateway.http.json_size import USUAL_BOUNDS, JsonBounds
from gateway.service import Service
from protocol.errors import RequestError

RECORDED_BOUNDS = JsonBounds(max_strings=1 << 19, max_values=1 << 19)
"""Bounds of a body with a generated response: the logprobs of 8,000 tokens with 20 top tokens each
are 504,000 strings and as many values. Decoding these takes about 60 ms."""


Body = TypeVar("Body", bound=msgspec.Struct)


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("rendering", __name__)
    for api, render in (
        ("chat/completions", render_chat),
        ("completions", render_completions),
        ("responses", render_responses),
        ("messages", render_messages),
    ):
        routes.post(f"/v1/{api}/render", endpoint=f"render_{api.replace('/', '_')}")(
            lambda render=render: render(service)
        )
    routes.post("/v1/chat/completions/derender", endpoint="derender_chat")(
        lambda: derender_chat(service)
    )
    routes.post("/v1/completions/derender", endpoint="derender_completions")(
        lambda: derender_completions(service)
    )
    return routes


# ---- render


def render_chat(service: Service) -> Response:
    body, carried, unknown = _read(service, requests.chat_decoder)
    checks.check_chat(body)
    preparation = _preparation(service, body)
    _note_ignored([*unknown, *preparation.ignored], body)
    return _chat(service, carried, preparation, preparation.prompt(body.messages), "chatcmpl")


def render_completions(service: Service) -> Response:
    bounds = service.id_bounds(service.config.max_prompts)
    body, carried, unknown = _read(service, requests.completion_decoder, bounds)
    checks.check_completion(body)
    model, config = service.model(body.model), service.config
    completion = Completion(body, model, max_prompts=config.max_prompts)
    _note_ignored([*unknown, *completion.ignored], body)
    check_counts(
        completion.prompt_requests, body, config.max_n, max(config.max_n, config.max_prompts)
    )
    try:
        return _json(rendered_completion(completion, model, carried, _id("cmpl")))
    except RequestError as error:
        raise completion.rename_field(error) from None


def render_responses(service: Service) -> Response:
    body, carried, unknown = _read(service, responses_decoder)
    check(body)
    items, before = history_of(service).items_of(body)
    model = service.model(body.model)
    trusts = service.config.trust_request_chat_template
    ready = rendered(body, [*before, *items], model, trusts_template=trusts)
    names = [*fields_without_effect(body, unknown), *ready.ignored]
    _note_ignored(names, ready.translation.chat)
    with ready.renaming():
        return _chat(service, carried, ready.preparation, ready.prompt, "resp")


def render_messages(service: Service) -> Response:
    body, carried, unknown = _read(service, messages_decoder)
    translation = translate(body)
    with translation.renaming():
        model = service.model(translation.chat.model)
        chat, _ = clamp_to_model(translation.chat, model.limits.max_len, model.output_format)
        preparation = _preparation(service, chat)
        _note_ignored([*unknown, *map(translation.request_path, preparation.ignored)], chat)
        return _chat(service, carried, preparation, preparation.prompt(chat.messages), "msg")


def _preparation(service: Service, body: requests.ChatBody) -> Preparation:
    trusts = service.config.trust_request_chat_template
    return Preparation(body, service.model(body.model), trusts_template=trusts)


def _chat(
    service: Service, carried: Carried, preparation: Preparation, prompt: Prompt, kind: str
) -> Response:
    config = service.config
    check_counts([], preparation.body, config.max_n, config.max_n)
    try:
        return _json(rendered_chat(preparation, prompt, carried, _id(kind)))
    except RequestError as error:
        raise preparation.rename_field(error) from None


def _read(
    service: Service, decoder: msgspec.json.Decoder[Body], bounds: JsonBounds = USUAL_BOUNDS
) -> tuple[Body, Carried, list[str]]:
    """Return (body, fields to copy, unknown fields)."""
    with service.bodies.read(request, bounds) as data:
        body = decode(data, decoder)
        return body, decode(data, carried_decoder), unknown_fields(data, type(body))


def _note_ignored(names: list[str], body: requests.GenerationBody) -> None:
    g.ignored = checks.ignored_fields(
        (name for name in names if name not in Carried.__struct_fields__), body
    )


def _id(kind: str) -> str:
    context: RequestContext = g.context
    return f"{kind}-{context.request_id}"


# ---- derender


def derender_chat(service: Service) -> Response:
    body = service.bodies.parse(request, derender_chat_decoder, RECORDED_BOUNDS)
    rendered_request = body.chat_request
    model = service.model(body.model or (rendered_request.model if rendered_request else None))
    derendering = ChatDerendering(body, model, service.config)
    return _chunk(*derendering.chunk()) if body.stream else _json_bytes(derendering.whole())


def derender_completions(service: Service) -> Response:
    body = service.bodies.parse(request, derender_completion_decoder, RECORDED_BOUNDS)
    rendered_request = body.completion_request
    model = service.model(body.model or (rendered_request.model if rendered_request else None))
    derendering = CompletionDerendering(body, model, service.config)
    return _chunk(*derendering.chunk()) if body.stream else _json_bytes(derendering.whole())


def _chunk(chunk: dict[str, Any] | None, state: str) -> Response:
    return _json({"chunk": chunk, "stream_state": state})


def _json(value: Any) -> Response:
    return _json_bytes(msgspec.json.encode(value))


def _json_bytes(data: bytes) -> Response:
    return flask.Response(data, content_type="application/json")
