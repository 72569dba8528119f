"""llama.cpp's routes /completion, /apply-template, /props and /slots."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from flask import Response, request

from gateway.api.infill.responses import InfillStream, whole_infill
from gateway.api.llama_cpp import responses
from gateway.api.llama_cpp.requests import LlamaCompletionBody, request_path
from gateway.api.llama_cpp.responses import (
    LlamaCompletionAnswer,
    LlamaCompletionChunk,
    LlamaCompletionEnvelope,
    ProbabilityReport,
)
from gateway.api.openai.checks import check_chat, check_completion
from gateway.api.openai.field_paths import ignored_fields, translate_errors
from gateway.api.openai.parameters import choices_of
from gateway.api.openai.prepare import Completion, Preparation
from gateway.api.openai.requests import ChatBody, OpenEndedCompletion
from gateway.api.openai.responses import ErrorAnswer
from gateway.context import RequestContext
from gateway.generation.job import Job, RequestOptions
from gateway.generation.request import PromptRequest
from gateway.http.route import Parameter, Routes, Stream, json_response
from gateway.service import Service
from protocol.wire.errors import InvalidRequest

routes = Routes("llama.cpp", ErrorAnswer, scope="inference")
COMPLETION: dict[str, Any] = {
    "takes": (LlamaCompletionBody,),
    "gives": (LlamaCompletionAnswer, dict[str, Any]),
    "streams": Stream((LlamaCompletionChunk, LlamaCompletionAnswer)),
}
MODEL = (Parameter("model", "One of several models; by default the only one."),)


@routes.post("/completion", about="Complete a text, as llama.cpp does.", **COMPLETION)
def llama_completion(service: Service, context: RequestContext) -> Response:
    return _complete(service, context)


@routes.post("/completions", about="The same as /completion.", **COMPLETION)
def llama_completions(service: Service, context: RequestContext) -> Response:
    return _complete(service, context)


def _complete(service: Service, context: RequestContext) -> Response:
    body, unknown = service.bodies.parse_known(request, LlamaCompletionBody)
    with translate_errors(request_path):
        asked = body.completion()
        check_completion(asked)
        use = service.use(context, asked.model, asked)
        with context.timeline.tokenizing():
            completion = Completion(asked, use.model, max_prompts=1)
        (prompt_request,) = completion.prompt_requests
        if asked.logprobs is not None and body.post_sampling_probs:
            prompt_request = _of_drawn(prompt_request)
        context.ignored = ignored_fields([*unknown, *completion.ignored], asked.strict_params)
        model, (params, *_) = use.model, prompt_request.choices
        prompt = body.prompt
        if not isinstance(prompt, str):
            prompt = model.tokenizer.decode(prompt, skip_special_tokens=False)
        is_reported = params.logprobs is not None
        envelope = LlamaCompletionEnvelope(
            model=asked.model or model.names[0],
            truncated=False,
            returns_tokens=bool(body.return_tokens),
            response_fields=body.response_fields or (),
            extensions=context.extensions(),
            prompt=prompt,
            settings=responses.settings_of(params, model.limits.max_len, asked.stop_strings),
            report=ProbabilityReport(model.tokenizer, bool(body.post_sampling_probs))
            if is_reported
            else None,
        )
        options = RequestOptions.from_body(asked, f"completion-{context.request_id}")
        job = Job(use, context, [prompt_request], options)
        if body.stream:
            return service.runner.stream(job, partial(InfillStream, envelope=envelope))
        group, collected = service.runner.whole(job)
    return json_response(whole_infill(group, collected, envelope))


def _of_drawn(prompt_request: PromptRequest) -> PromptRequest:
    """Return the request with the logprobs of the distribution that its tokens are drawn from.
    Raise InvalidRequest if nothing is drawn."""
    try:
        choices = [
            msgspec.structs.replace(params, logprobs_of="sampling")
            for params in prompt_request.choices
        ]
    except ValueError as error:  # the message begins with the field's name
        _, _, problem = str(error).partition(": ")
        raise InvalidRequest.at("logprobs_of", problem) from None
    return replace(prompt_request, choices=choices)


@routes.post(
    "/apply-template",
    about="Render a conversation with the chat template, without an answer.",
    takes=(ChatBody,),
    gives=responses.AppliedTemplate,
)
def apply_template(service: Service, context: RequestContext) -> Response:
    body = service.bodies.parse(request, ChatBody)
    check_chat(body)
    model = service.use(context, body.model).model
    trusts = service.config.trust_request_chat_template
    prompt = Preparation(body, model, trusts_template=trusts).prompt(body.messages)
    return json_response(responses.AppliedTemplate(prompt.text))


@routes.get(
    "/props",
    about="Describe the server and its model, as llama.cpp does.",
    gives=responses.Properties,
    parameters=MODEL,
)
def props(service: Service, context: RequestContext) -> Response:
    model = service.use(context, request.args.get("model")).model
    values = model.defaults.for_request()
    (defaults,) = choices_of(OpenEndedCompletion(prompt=""), values, model.tokenizer)
    return json_response(responses.properties_of(model, defaults))


@routes.get(
    "/slots",
    about="List the places for requests that are computed, and how many are in use.",
    gives=list[responses.SlotState],
    parameters=MODEL,
)
def slots(service: Service, context: RequestContext) -> Response:
    use = service.use(context, request.args.get("model"))
    stats = use.engine.stats
    limits = use.model.limits
    busy = 0 if stats is None else stats.running
    return json_response([*responses.slot_states(limits.max_len, limits.max_slots, busy)])
