"""The routes /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from flask import Response, request

from gateway.api.anthropic import requests, responses
from gateway.api.anthropic.responses import AnthropicEnvelope
from gateway.api.anthropic.stream import PING, EventWriter, whole_message
from gateway.api.anthropic.translate import MessagesTranslation, translate, without_unkept_budget
from gateway.api.openai.field_paths import ignored_fields
from gateway.api.openai.prepare import Preparation, Prompt
from gateway.context import RequestContext
from gateway.formats.events import OutputWarning
from gateway.generation.group import ChoiceGroup
from gateway.generation.job import Job, RequestOptions
from gateway.http.client_socket import Outlet
from gateway.http.route import Routes, Stream, json_response
from gateway.served_model import ServedModel
from gateway.service import Service
from gateway.store.uploaded_images import UploadedImages

Body = TypeVar("Body", bound=requests.CountBody)


routes = Routes("Anthropic", responses.MessagesErrorAnswer, scope="inference")


@routes.post(
    "/v1/messages",
    about="Create a message.",
    takes=(requests.MessagesBody,),
    gives=responses.AnsweredMessage,
    streams=Stream(responses.StreamEvent),
)
def messages(service: Service, context: RequestContext) -> Response:
    body, translation = _translated(service, context, requests.MessagesBody)
    with translation.translate_errors():
        use = service.use(context, translation.chat.model, translation.chat)
        preparation, prompt, warnings = _prepare(service, context, translation, use.model)
    with translation.translate_errors(preparation.engine_fields):
        prompt_request = preparation.prompt_request(prompt)
        envelope = _envelope(context, preparation, prompt, translation, warnings)
        options = RequestOptions.from_body(body, envelope.id)
        job = Job(use, context, [prompt_request], options)
        if body.stream:
            return service.runner.stream(job, partial(_writer, envelope=envelope))
        group, collected = service.runner.whole(job)
    return json_response(whole_message(group, collected.whole[0].events, envelope))


@routes.post(
    "/v1/messages/count_tokens",
    about="Count the prompt tokens of a request.",
    takes=(requests.CountBody,),
    gives=responses.InputTokenCount,
)
def count_tokens(service: Service, context: RequestContext) -> Response:
    body, translation = _translated(service, context, requests.CountBody)
    with translation.translate_errors():
        model = service.use(context, translation.chat.model).model
        _, prompt, _ = _prepare(service, context, translation, model)
    extensions = context.extensions(prompt.effective if body.return_effective_kwargs else None)
    return json_response(responses.InputTokenCount(input_tokens=len(prompt.ids), **extensions))


def _translated(
    service: Service, context: RequestContext, kind: type[Body]
) -> tuple[Body, MessagesTranslation]:
    body, unknown = service.bodies.parse_known(request, kind)
    translation = translate(body)
    context.ignored = ignored_fields([*unknown, *translation.ignored], body.strict_params)
    return body, translation


def _prepare(
    service: Service,
    context: RequestContext,
    translation: MessagesTranslation,
    model: ServedModel,
) -> tuple[Preparation, Prompt, list[OutputWarning]]:
    chat, warnings = without_unkept_budget(translation.chat, model.output_format)
    trusts = service.config.trust_request_chat_template
    preparation = Preparation(
        chat,
        model,
        trusts_template=trusts,
        shown_tools=translation.shown_tools,
        files=UploadedImages(service.files, context.caller.owner),
    )
    context.ignored = ignored_fields(
        [*context.ignored, *map(translation.request_path, preparation.ignored)], chat.strict_params
    )
    with context.timeline.tokenizing():
        prompt = preparation.prompt(chat.messages)
    context.timeline.note_prompts([prompt])
    return preparation, prompt, warnings


def _envelope(
    context: RequestContext,
    preparation: Preparation,
    prompt: Prompt,
    translation: MessagesTranslation,
    warnings: Sequence[OutputWarning],
) -> AnthropicEnvelope:
    chat, limits = translation.chat, preparation.model.limits
    return AnthropicEnvelope(
        context.request_id,
        chat.model or preparation.model.names[0],
        shows_thinking=translation.shows_thinking,
        extensions=context.extensions(prompt.effective if chat.return_effective_kwargs else None),
        warnings=[*translation.warnings, *prompt.warnings, *warnings],
        block_tokens=limits.block_tokens if limits.prefix_cache else 0,
    )


def _writer(group: ChoiceGroup, outlet: Outlet, envelope: AnthropicEnvelope) -> EventWriter:
    return EventWriter(group, outlet, envelope, on_start=lambda: outlet.set_keep_alive(PING))
