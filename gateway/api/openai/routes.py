"""The OpenAI routes: chat completions, batches of them, and completions.

A view checks and translates its API's fields; `respond` generates the response.
"""

from __future__ import annotations

from flask import Blueprint, Response, g, request

from gateway.api.openai import checks, requests
from gateway.api.openai.completion import Completion
from gateway.api.openai.prepare import Preparation
from gateway.api.openai.respond import envelope_of, respond
from gateway.api.openai.response_builder import ChatResponseBuilder
from gateway.engine.kv_params import has_no_effect
from gateway.generation.run import raise_cached_refusal
from gateway.served_model import ServedModel
from gateway.service import Service
from protocol.errors import RequestError
from protocol.kv import KV_FIELD


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("openai", __name__)
    routes.post("/v1/chat/completions", endpoint="chat")(lambda: chat(service))
    routes.post("/v1/chat/completions/batch", endpoint="batch")(lambda: batch(service))
    routes.post("/v1/completions", endpoint="completions")(lambda: completions(service))
    return routes


def chat(service: Service) -> Response:
    body, unknown = service.bodies.parse_known(request, requests.chat_decoder)
    checks.check_chat(body)
    model = service.model(body.model)
    raise_cached_refusal(service)
    preparation = _preparation(service, body, model)
    _note_ignored([*unknown, *preparation.ignored], body, model)
    with g.context.journal.tokenizing():
        prompt = preparation.prompt(body.messages)
    effective = prompt.effective if body.return_effective_kwargs else None
    try:
        return respond(
            service,
            body,
            [preparation.prompt_request(prompt)],
            ChatResponseBuilder(model.tokenizer, body.num_logprobs, body.logprob_token_ids or ()),
            envelope_of("chatcmpl", body.model, model, effective=effective),
        )
    except RequestError as error:
        raise preparation.rename_field(error) from None


def batch(service: Service) -> Response:
    """Answer several conversations. The choices are ordered by conversation; each conversation has
    its own template arguments, prompt and parsers."""
    body, unknown = service.bodies.parse_known(request, requests.batch_decoder)
    checks.check_batch(body, service.config.max_prompts)
    model = service.model(body.model)
    raise_cached_refusal(service)
    preparation = _preparation(service, body, model)
    _note_ignored([*unknown, *preparation.ignored], body, model)
    with g.context.journal.tokenizing():
        prompts = [
            preparation.prompt(messages, f"messages[{place}]")
            for place, messages in enumerate(body.messages)
        ]
    effective = None
    if body.return_effective_kwargs:
        effective = [prompt.effective for prompt in prompts]
    try:
        return respond(
            service,
            body,
            [preparation.prompt_request(prompt) for prompt in prompts],
            ChatResponseBuilder(
                model.tokenizer, body.num_logprobs, body.logprob_token_ids or (), in_batch=True
            ),
            envelope_of("chatcmpl", body.model, model, effective=effective),
        )
    except RequestError as error:
        raise preparation.rename_field(error) from None


def _preparation(
    service: Service, body: requests.ChatBody | requests.BatchBody, model: ServedModel
) -> Preparation:
    trusts = service.config.trust_request_chat_template
    return Preparation(body, model, trusts_template=trusts)


def _note_ignored(ignored: list[str], body: requests.GenerationBody, model: ServedModel) -> None:
    if has_no_effect(body.kv_transfer_params, model.limits):
        ignored.append(KV_FIELD)
    g.ignored = checks.ignored_fields(ignored, body)


def completions(service: Service) -> Response:
    bounds = service.id_bounds(service.config.max_prompts)
    body, unknown = service.bodies.parse_known(request, requests.completion_decoder, bounds)
    checks.check_completion(body)
    model = service.model(body.model)
    raise_cached_refusal(service)
    with g.context.journal.tokenizing():
        completion = Completion(body, model, max_prompts=service.config.max_prompts)
    _note_ignored([*unknown, *completion.ignored], body, model)
    try:
        return respond(
            service,
            body,
            completion.prompt_requests,
            completion.builder(),
            envelope_of("cmpl", body.model, model),
        )
    except RequestError as error:
        raise completion.rename_field(error) from None
