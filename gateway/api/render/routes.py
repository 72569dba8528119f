"""The render routes of all APIs, and the derender routes of chats and completions.

These routes do not use the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from flask import Response, request

from gateway.api.anthropic.requests import MessagesBody
from gateway.api.anthropic.responses import MessagesErrorAnswer
from gateway.api.anthropic.translate import translate, without_unkept_budget
from gateway.api.openai import checks, prepare, requests
from gateway.api.openai.field_paths import ignored_fields, translate_errors, unchanged
from gateway.api.openai.parameters import check_counts
from gateway.api.openai.responses import ChatCompletion, CompletionResponse, ErrorAnswer
from gateway.api.render import responses
from gateway.api.render.derender import ChatDerendering, CompletionDerendering
from gateway.api.render.render import rendered_chat, rendered_completion
from gateway.api.render.requests import Carried, DerenderChat, DerenderCompletion
from gateway.api.responses.requests import ResponsesBody, check, fields_without_effect
from gateway.api.responses.routes import history_of
from gateway.api.responses.translate import rendered
from gateway.context import RequestContext
from gateway.http.body import convert, unknown_fields
from gateway.http.json_size import USUAL_BOUNDS, JsonBounds
from gateway.http.route import Routes, json_response
from gateway.service import Service
from gateway.store.uploaded_images import UploadedImages

RECORDED_BOUNDS = JsonBounds(max_strings=1 << 19, max_values=1 << 19)
"""Bounds of a body with a generated response. The logprobs of 8,000 tokens with 20 top tokens each
have 504,000 strings and as many values. Decoding them takes about 60 ms."""


Body = TypeVar("Body", bound=msgspec.Struct)


routes = Routes("Rendering", ErrorAnswer, scope="inference")


# ---- render


@routes.post(
    "/v1/chat/completions/render",
    about="Render a chat request into a request to the token endpoint.",
    takes=(requests.ChatBody,),
    gives=responses.RenderedRequest,
)
def render_chat(service: Service, context: RequestContext) -> Response:
    body, carried, unknown = _read(service, requests.ChatBody)
    checks.check_chat(body)
    preparation = _preparation(service, context, body)
    _note_ignored(context, [*unknown, *preparation.ignored], body)
    prompt = preparation.prompt(body.messages)
    with translate_errors(preparation.request_path, preparation.engine_fields):
        return _chat(service, context, carried, preparation, prompt, "chatcmpl")


@routes.post(
    "/v1/completions/render",
    about="Render a completion request into requests to the token endpoint, one per prompt.",
    takes=(requests.CompletionBody,),
    gives=list[responses.RenderedRequest],
)
def render_completions(service: Service, context: RequestContext) -> Response:
    bounds = service.id_bounds(service.config.max_prompts)
    body, carried, unknown = _read(service, requests.CompletionBody, bounds)
    checks.check_completion(body)
    model, config = service.use(context, body.model).model, service.config
    completion = prepare.Completion(body, model, max_prompts=config.max_prompts)
    _note_ignored(context, [*unknown, *completion.ignored], body)
    check_counts(
        completion.prompt_requests, body, config.max_n, max(config.max_n, config.max_prompts)
    )
    with translate_errors(unchanged, completion.engine_fields):
        return json_response(rendered_completion(completion, model, carried, _id(context, "cmpl")))


@routes.post(
    "/v1/responses/render",
    about="Render a Responses request into a request to the token endpoint.",
    takes=(ResponsesBody,),
    gives=responses.RenderedRequest,
)
def render_responses(service: Service, context: RequestContext) -> Response:
    body, carried, unknown = _read(service, ResponsesBody)
    check(body)
    items, before = history_of(service, context).read_items(body)
    model = service.use(context, body.model).model
    trusts = service.config.trust_request_chat_template
    files = UploadedImages(service.files, context.caller.owner)
    ready = rendered(body, [*before, *items], model, trusts_template=trusts, files=files)
    names = [*fields_without_effect(body, unknown), *ready.ignored]
    _note_ignored(context, names, ready.translation.chat)
    with ready.translate_errors():
        return _chat(service, context, carried, ready.preparation, ready.prompt, "resp")


@routes.post(
    "/v1/messages/render",
    about="Render a Messages request into a request to the token endpoint.",
    takes=(MessagesBody,),
    gives=responses.RenderedRequest,
    error=MessagesErrorAnswer,
)
def render_messages(service: Service, context: RequestContext) -> Response:
    body, carried, unknown = _read(service, MessagesBody)
    translation = translate(body)
    with translation.translate_errors():
        model = service.use(context, translation.chat.model).model
        chat, _ = without_unkept_budget(translation.chat, model.output_format)
        preparation = _preparation(service, context, chat, translation.shown_tools)
        ignored = map(translation.request_path, preparation.ignored)
        _note_ignored(context, [*unknown, *translation.ignored, *ignored], chat)
        prompt = preparation.prompt(chat.messages)
    with translation.translate_errors(preparation.engine_fields):
        return _chat(service, context, carried, preparation, prompt, "msg")


def _preparation(
    service: Service,
    context: RequestContext,
    body: requests.ChatBody,
    shown_tools: Sequence[Mapping[str, Any]] | None = None,
) -> prepare.Preparation:
    return prepare.Preparation(
        body,
        service.use(context, body.model).model,
        trusts_template=service.config.trust_request_chat_template,
        shown_tools=shown_tools,
        files=UploadedImages(service.files, context.caller.owner),
    )


def _chat(
    service: Service,
    context: RequestContext,
    carried: Carried,
    preparation: prepare.Preparation,
    prompt: prepare.Prompt,
    kind: str,
) -> Response:
    config = service.config
    check_counts([], preparation.body, config.max_n, config.max_n)
    return json_response(rendered_chat(preparation, prompt, carried, _id(context, kind)))


def _read(
    service: Service, kind: type[Body], bounds: JsonBounds = USUAL_BOUNDS
) -> tuple[Body, Carried, list[str]]:
    """Return (body, fields to copy to the rendered request, unknown fields)."""
    with service.bodies.read(request, bounds) as fields:
        return convert(fields, kind), convert(fields, Carried), unknown_fields(fields, kind)


def _note_ignored(context: RequestContext, names: list[str], body: requests.GenerationBody) -> None:
    context.ignored = ignored_fields(
        (name for name in names if name not in Carried.__struct_fields__), body.strict_params
    )


def _id(context: RequestContext, kind: str) -> str:
    return f"{kind}-{context.request_id}"


# ---- derender


@routes.post(
    "/v1/chat/completions/derender",
    about="Convert a response of the token endpoint into a chat completion.\n"
    "With `stream`, one chunk per call; the client passes the state to the next call.",
    takes=(DerenderChat,),
    gives=(ChatCompletion, responses.DerenderedChatChunk),
)
def derender_chat(service: Service, context: RequestContext) -> Response:
    body = service.bodies.parse(request, DerenderChat, RECORDED_BOUNDS)
    rendered_request = body.chat_request
    name = body.model or (rendered_request.model if rendered_request else None)
    model = service.use(context, name).model
    derendering = ChatDerendering(body, model, service.config)
    return _chunk(*derendering.chunk()) if body.stream else json_response(derendering.whole())


@routes.post(
    "/v1/completions/derender",
    about="Convert responses of the token endpoint into a completion.\n"
    "With `stream`, one chunk per call; the client passes the state to the next call.",
    takes=(DerenderCompletion,),
    gives=(CompletionResponse, responses.DerenderedCompletionChunk),
)
def derender_completions(service: Service, context: RequestContext) -> Response:
    body = service.bodies.parse(request, DerenderCompletion, RECORDED_BOUNDS)
    rendered_request = body.completion_request
    name = body.model or (rendered_request.model if rendered_request else None)
    model = service.use(context, name).model
    derendering = CompletionDerendering(body, model, service.config)
    return _chunk(*derendering.chunk()) if body.stream else json_response(derendering.whole())


def _chunk(chunk: dict[str, Any] | None, state: str) -> Response:
    return json_response({"chunk": chunk, "stream_state": state})
