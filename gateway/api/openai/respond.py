"""Generates the response of a chat or completion: a stream of chunks, or one JSON object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import flask
from flask import Response, g

from gateway.api.openai.requests import GenerationBody
from gateway.api.openai.response_builder import OpenAIEnvelope, ResponseBuilder
from gateway.api.openai.stream import ChunkStream
from gateway.api.openai.whole import whole_response
from gateway.api.resume import respond as resume
from gateway.context import RequestContext
from gateway.engine.kv_params import apply_kv_params, parse_kv_params, response_kv_params
from gateway.formats.events import OutputWarning
from gateway.generation import run
from gateway.generation.choice import Choice
from gateway.generation.group import ChoiceGroup
from gateway.generation.parameters import check_counts
from gateway.generation.request import PromptRequest
from gateway.served_model import ServedModel
from gateway.service import Service
from gateway.text.logprobs import prompt_chances
from protocol.kv import KV_FIELD


def envelope_of(
    kind: str,
    name: str | None,
    model: ServedModel,
    *,
    effective: Any = None,
    warnings: list[OutputWarning] | None = None,
) -> OpenAIEnvelope:
    """Return the envelope of the current request. `effective` is None if it was not requested."""
    context: RequestContext = g.context
    extensions: dict[str, Any] = {}
    if g.get("ignored"):
        extensions["ignored_params"] = g.ignored
    if effective is not None:
        extensions["effective"] = effective
    return OpenAIEnvelope(
        f"{kind}-{context.request_id}",
        name or model.names[0],
        model.fingerprint,
        extensions=extensions,
        warnings=warnings or [],
    )


def respond(
    service: Service,
    body: GenerationBody,
    prompt_requests: list[PromptRequest],
    builder: ResponseBuilder,
    envelope: OpenAIEnvelope,
) -> Response:
    """Run the requests and return the response. A refusal raises before any header is sent."""
    config, limits = service.config, service.model(body.model).limits
    prompt_requests = apply_kv_params(
        prompt_requests, parse_kv_params(body.kv_transfer_params), limits, streams=bool(body.stream)
    )
    check_counts(prompt_requests, body, config.max_n, max(config.max_n, config.max_prompts))
    options = run.RequestOptions.of(body, envelope.id)
    if body.stream:
        make_sink = partial(_chunk_stream, body=body, builder=builder, envelope=envelope)
        stream = resume.start_resumable if resume.is_requested() else run.stream
        return stream(service, prompt_requests, options, make_sink)
    group, collected = run.whole(service, prompt_requests, options)
    if (params := response_kv_params(group)) is not None:
        envelope = replace(envelope, extensions={**envelope.extensions, KV_FIELD: params})
    data = whole_response(
        group,
        collected,
        builder,
        envelope,
        includes_ids=bool(body.return_token_ids),
        prompt_logprobs=prompt_shape(body, service.model(body.model)),
    )
    return flask.Response(data, content_type="application/json")


def prompt_shape(
    body: GenerationBody, model: ServedModel
) -> Callable[[Choice], list[Any] | None] | None:
    """Return a function that formats a choice's prompt logprobs; None if they are not
    requested."""
    num_top = body.prompt_logprobs
    if num_top is None:
        return None
    return lambda choice: prompt_chances(model.tokenizer, choice.prompt_logprobs, num_top)


def _chunk_stream(
    group: ChoiceGroup,
    outlet: resume.Frames,
    *,
    body: GenerationBody,
    builder: ResponseBuilder,
    envelope: OpenAIEnvelope,
) -> ChunkStream:
    return ChunkStream(
        group,
        builder,
        envelope,
        write=outlet.write,
        finish=outlet.finish,
        includes_usage=body.includes_usage,
        repeats_usage=body.repeats_usage,
        includes_ids=bool(body.return_token_ids),
    )
