"""The routes of Ollama's API.

Bodies are read as JSON whatever their content type is, because the examples of Ollama's
documentation send them with curl's default type. Pages of other sites gain nothing by that: the
gate checks the origin of every request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from flask import Response, request

from gateway.api.ollama import models, responses
from gateway.api.ollama.requests import (
    NamedModelBody,
    OllamaBody,
    OllamaChatBody,
    OllamaCopyBody,
    OllamaGenerateBody,
    OllamaOptions,
    OllamaPullBody,
)
from gateway.api.ollama.stream import (
    AnswerPart,
    LineWriter,
    OllamaEnvelope,
    new_record,
    whole_record,
)
from gateway.api.ollama.translate import (
    chat_of,
    check_generate,
    check_thinking,
    completion_of,
    generated_path,
    prompted_chat,
    request_path,
    unloads,
)
from gateway.api.openai.field_paths import RequestPath, translate_errors
from gateway.api.openai.prepare import Completion, Preparation
from gateway.api.openai.requests import ChatBody, OpenEndedCompletion
from gateway.api.server.admin import listed_models
from gateway.auth.gate import Forbidden
from gateway.context import RequestContext
from gateway.generation.job import Job, RequestOptions
from gateway.generation.request import PromptRequest
from gateway.http.body import convert, unknown_fields
from gateway.http.route import Routes, Stream, json_response
from gateway.http.sse import JSON_LINES
from gateway.model_use import ModelUse
from gateway.served_model import version
from gateway.service import Service
from protocol.engine.sampling import check_token_ids
from protocol.wire.errors import InvalidRequest

Body = TypeVar(
    "Body", NamedModelBody, OllamaPullBody, OllamaCopyBody, OllamaChatBody, OllamaGenerateBody
)

routes = Routes("Ollama", responses.OllamaError, scope="inference")


@routes.post(
    "/api/chat",
    about="Answer a conversation.",
    takes=(OllamaChatBody,),
    gives=responses.OllamaChatAnswer,
    streams=Stream(responses.OllamaChatAnswer, is_lines=True),
)
def chat(service: Service, context: RequestContext) -> Response:
    body = read_body(service, context, OllamaChatBody)
    if not body.messages:
        return _load(service, context, body)
    asked = chat_of(body)
    return _answer_chat(service, context, body, asked, request_path)


@routes.post(
    "/api/generate",
    about="Answer a prompt, continue a text, or fill in the middle of one.",
    takes=(OllamaGenerateBody,),
    gives=responses.OllamaGenerated,
    streams=Stream(responses.OllamaGenerated, is_lines=True),
)
def generate(service: Service, context: RequestContext) -> Response:
    body = read_body(service, context, OllamaGenerateBody)
    check_generate(body)
    if not (body.prompt or body.suffix):
        return _load(service, context, body)
    if body.raw or body.suffix:
        return _answer_text(service, context, body, completion_of(body))
    return _answer_chat(service, context, body, prompted_chat(body), generated_path)


def read_body(service: Service, context: RequestContext, kind: type[Body]) -> Body:
    """Return the request's body. Record the fields and options without effect in the context."""
    with service.bodies.read(request, service.id_bounds(), any_type=True) as fields:
        body = convert(fields, kind)
        unused = unknown_fields(fields, kind)
        if isinstance(options := fields.get("options"), dict):
            unused += [f"options.{name}" for name in unknown_fields(options, OllamaOptions)]
    if isinstance(body, OllamaBody):
        unloads(body.keep_alive)  # checks it
        if body.keep_alive is not None:
            unused.append("keep_alive")
    context.ignored = unused
    return body


def named(body: NamedModelBody) -> str:
    """Return the model that a body names. Raises InvalidRequest if it names none."""
    name = body.model or body.name
    if not name:
        raise InvalidRequest.at("model", "this field is required")
    return name


def _use(
    service: Service, context: RequestContext, asked: ChatBody | OpenEndedCompletion
) -> ModelUse:
    return service.use(context, models.served_name(asked.model or "", service.names), asked)


def _answer_chat(
    service: Service,
    context: RequestContext,
    body: OllamaChatBody | OllamaGenerateBody,
    asked: ChatBody,
    path: RequestPath,
) -> Response:
    """Answer a conversation. `path` maps field paths of the chat to those of the request."""
    is_generated = isinstance(body, OllamaGenerateBody)
    with translate_errors(path):
        use = _use(service, context, asked)
        check_thinking(body, use.model.output_format)
        preparation = Preparation(asked, use.model)
        with context.timeline.tokenizing():
            prompt = preparation.prompt(asked.messages)
        context.timeline.note_prompts([prompt])
        context.ignored = [*context.ignored, *map(path, preparation.ignored)]
        envelope = OllamaEnvelope(
            body.model,
            use.model.tokenizer,
            is_generated=is_generated,
            has_context=is_generated,
            num_logprobs=asked.num_logprobs,
            waited_s=use.waited_s,
        )
    with translate_errors(path, preparation.engine_fields):
        prompt_request = preparation.prompt_request(prompt)
        if isinstance(body, OllamaGenerateBody) and body.context:
            prompt_request = _continued(prompt_request, body.context, use)
        job = Job(use, context, [prompt_request], _options(context, asked))
        return _respond(service, job, envelope, streams=asked.stream)


def _options(context: RequestContext, asked: ChatBody | OpenEndedCompletion) -> RequestOptions:
    return RequestOptions.from_body(asked, f"ollama-{context.request_id}")


def _continued(
    prompt_request: PromptRequest, earlier: Sequence[int], use: ModelUse
) -> PromptRequest:
    """Return the request with the tokens `earlier` before its prompt."""
    card = use.model.card
    check_token_ids(earlier, card.vocab_size, "context")
    ids = prompt_request.prompt_ids
    if ids[:1] == [card.bos_token_id]:
        ids = ids[1:]
    return replace(prompt_request, prompt_ids=[*earlier, *ids])


def _answer_text(
    service: Service,
    context: RequestContext,
    body: OllamaGenerateBody,
    asked: OpenEndedCompletion,
) -> Response:
    with translate_errors(request_path):
        use = _use(service, context, asked)
        with context.timeline.tokenizing():
            completion = Completion(asked, use.model, max_prompts=1)
        context.ignored = [*context.ignored, *map(request_path, completion.ignored)]
        envelope = OllamaEnvelope(
            body.model,
            use.model.tokenizer,
            is_generated=True,
            num_logprobs=asked.num_logprobs,
            waited_s=use.waited_s,
        )
    with translate_errors(request_path, completion.engine_fields):
        job = Job(use, context, completion.prompt_requests, _options(context, asked))
        return _respond(service, job, envelope, streams=asked.stream)


def _respond(
    service: Service, job: Job, envelope: OllamaEnvelope, *, streams: bool | None
) -> Response:
    if streams:
        return service.runner.stream(job, partial(LineWriter, envelope=envelope), JSON_LINES)
    group, collected = service.runner.whole(job)
    return json_response(whole_record(group, collected, envelope))


def _load(
    service: Service, context: RequestContext, body: OllamaChatBody | OllamaGenerateBody
) -> Response:
    """Load the model and wait until it is ready; or unload it, if the request says so."""
    name = models.served_name(body.model, service.names)
    unload = unloads(body.keep_alive)
    if unload:
        context.ignored.remove("keep_alive")
        _unload(service, context, name)
    else:
        service.use(context, name)
    record = new_record(
        body.model,
        AnswerPart(),
        is_generated=isinstance(body, OllamaGenerateBody),
        done=True,
        done_reason="unload" if unload else "load",
    )
    return json_response(record)


def _unload(service: Service, context: RequestContext, name: str) -> None:
    if "admin" not in context.caller.scopes:
        raise Forbidden("keep_alive: only a key with the scope 'admin' may unload a model")
    host = service.host(name)
    if host.names and name not in host.names:
        raise service.unknown_model(name)
    host.sleep()


# ---- models


@routes.get(
    "/api/tags",
    about="List the served models, each under all of its names.",
    gives=responses.ModelTags,
)
def tags(service: Service, context: RequestContext) -> Response:
    listed = listed_models(service)
    entries = [models.summary(facts, name) for name, facts in listed.items()]
    return json_response(responses.ModelTags(entries))


@routes.get("/api/ps", about="List the models that are loaded.", gives=responses.RunningModels)
def running(service: Service, context: RequestContext) -> Response:
    ready = [facts for host in service.ready_hosts if (facts := host.facts()) is not None]
    entries = [models.running(facts, facts.names[0]) for facts in ready]
    return json_response(responses.RunningModels(entries))


@routes.post(
    "/api/show",
    about="Describe one served model.",
    takes=(NamedModelBody,),
    gives=responses.ShownModel,
)
def show(service: Service, context: RequestContext) -> Response:
    name = named(read_body(service, context, NamedModelBody))
    listed = listed_models(service)
    served = models.served_name(name, listed)
    if served not in listed:
        raise service.unknown_model(name)
    return json_response(models.shown(listed[served]))


@routes.get(
    "/api/version",
    about="Return the version of Ollama's API that is served.",
    gives=responses.ApiVersion,
)
def api_version(service: Service, context: RequestContext) -> Response:
    return json_response(responses.ApiVersion(version=responses.API_VERSION, tidegate=version()))
