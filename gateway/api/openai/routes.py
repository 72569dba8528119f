"""The OpenAI routes: chat completions, batches of them, and completions.

A view reads and checks the body, and prepares the job. Then the job is run, and its answer is
returned as a stream of chunks or as one JSON object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flask import Response, request

from gateway.api.openai import checks, prepare, requests, responses
from gateway.api.openai import resume_routes as resume
from gateway.api.openai.field_paths import ignored_fields, translate_errors, unchanged
from gateway.api.openai.parameters import check_counts
from gateway.api.openai.response_builder import (
    ChatResponseBuilder,
    OpenAIEnvelope,
    ResponseBuilder,
    prompt_logprobs_builder,
)
from gateway.api.openai.stream import ChunkStream, chunk_options, whole_response
from gateway.context import RequestContext
from gateway.generation.frame_sink import FrameDestination
from gateway.generation.group import ChoiceGroup
from gateway.generation.job import Job, RequestOptions
from gateway.generation.kv_params import (
    KVTransferParams,
    apply_kv_params,
    parse_kv_params,
    response_kv_params,
)
from gateway.http.route import Routes, Stream, json_response
from gateway.served_model import ServedModel
from gateway.service import Service
from gateway.store.uploaded_images import UploadedImages
from protocol.worker.kv import KV_FIELD

routes = Routes("OpenAI", responses.ErrorAnswer, scope="inference")


@routes.post(
    "/v1/chat/completions",
    about="Create a chat completion.",
    takes=(requests.ChatBody,),
    gives=responses.ChatCompletion,
    streams=Stream(responses.ChatChunk, ends_with="[DONE]"),
)
def chat(service: Service, context: RequestContext) -> Response:
    body, unknown = service.bodies.parse_known(request, requests.ChatBody)
    checks.check_chat(body)
    return _answer_chats(service, context, body, unknown, {"messages": body.messages})


@routes.post(
    "/v1/chat/completions/batch",
    about="Create chat completions for several conversations.\n"
    "All fields except `messages` apply to every conversation.",
    takes=(requests.BatchBody,),
    gives=responses.ChatBatch,
)
def batch(service: Service, context: RequestContext) -> Response:
    """Answer several conversations. The choices are ordered by conversation. Each conversation has
    its own template arguments, prompt and parsers."""
    body, unknown = service.bodies.parse_known(request, requests.BatchBody)
    checks.check_batch(body, service.config.max_prompts)
    conversations = {f"messages[{place}]": value for place, value in enumerate(body.messages)}
    return _answer_chats(service, context, body, unknown, conversations)


def _answer_chats(
    service: Service,
    context: RequestContext,
    body: requests.ChatBody | requests.BatchBody,
    unknown: list[str],
    conversations: Mapping[str, Sequence[Any]],
) -> Response:
    """Answer the conversations of a body. `conversations` maps their paths to their messages."""
    use = service.use(context, body.model, body)
    in_batch = isinstance(body, requests.BatchBody)
    model = use.model
    trusts = service.config.trust_request_chat_template
    files = UploadedImages(service.files, context.caller.owner)
    preparation = prepare.Preparation(body, model, trusts_template=trusts, files=files)
    with context.timeline.tokenizing():
        prompts = [preparation.prompt(value, path) for path, value in conversations.items()]
    context.timeline.note_prompts(prompts)
    kv_params = _kv_params(context, [*unknown, *preparation.ignored], body, model)
    builder = ChatResponseBuilder(
        model.tokenizer,
        body.num_logprobs,
        body.logprob_token_ids or (),
        reasoning_fields=service.config.reasoning_fields,
        in_batch=in_batch,
    )
    envelope = _envelope(context, "chatcmpl", body, model)
    if body.return_effective_kwargs:
        effective = [prompt.effective for prompt in prompts]
        envelope.extensions["effective"] = effective if in_batch else effective[0]
    with translate_errors(preparation.request_path, preparation.engine_fields):
        prompt_requests = [preparation.prompt_request(prompt) for prompt in prompts]
        prompt_requests = apply_kv_params(prompt_requests, kv_params, streams=bool(body.stream))
        job = Job(use, context, prompt_requests, RequestOptions.from_body(body, envelope.id))
        return _respond(service, job, body, builder, envelope)


@routes.post(
    "/v1/completions",
    about="Create a completion of one or more prompts.",
    takes=(requests.CompletionBody,),
    gives=responses.CompletionResponse,
    streams=Stream(responses.CompletionChunk, ends_with="[DONE]"),
)
def completions(service: Service, context: RequestContext) -> Response:
    bounds = service.id_bounds(service.config.max_prompts)
    body, unknown = service.bodies.parse_known(request, requests.CompletionBody, bounds)
    checks.check_completion(body)
    use = service.use(context, body.model, body)
    model = use.model
    with context.timeline.tokenizing():
        completion = prepare.Completion(body, model, max_prompts=service.config.max_prompts)
    kv_params = _kv_params(context, [*unknown, *completion.ignored], body, model)
    envelope = _envelope(context, "cmpl", body, model)
    with translate_errors(unchanged, completion.engine_fields):
        prompt_requests = apply_kv_params(
            completion.prompt_requests, kv_params, streams=bool(body.stream)
        )
        job = Job(use, context, prompt_requests, RequestOptions.from_body(body, envelope.id))
        return _respond(service, job, body, completion.builder(), envelope)


def _kv_params(
    context: RequestContext, ignored: list[str], body: requests.GenerationBody, model: ServedModel
) -> KVTransferParams | None:
    """Return the checked `kv_transfer_params`. Record the fields without effect in the context."""
    params = parse_kv_params(body.kv_transfer_params, model.limits)
    if params is None and body.kv_transfer_params is not None:
        ignored.append(KV_FIELD)
    context.ignored = ignored_fields(ignored, body.strict_params)
    return params


def _envelope(
    context: RequestContext, kind: str, body: requests.GenerationBody, model: ServedModel
) -> OpenAIEnvelope:
    return OpenAIEnvelope(
        f"{kind}-{context.request_id}",
        body.model or model.names[0],
        model.fingerprint,
        extensions=context.extensions(),
    )


def _respond(
    service: Service,
    job: Job,
    body: requests.GenerationBody,
    builder: ResponseBuilder,
    envelope: OpenAIEnvelope,
) -> Response:
    """Run the job and return the response. If the engine refuses it, raise its error before any
    header is sent."""
    config, runner = service.config, service.runner
    check_counts(job.prompts, body, config.max_n, max(config.max_n, config.max_prompts))
    if body.stream:

        def make_sink(group: ChoiceGroup, destination: FrameDestination) -> ChunkStream:
            return ChunkStream(group, destination, builder, envelope, **chunk_options(body))

        if resume.is_requested(job.context):
            return resume.start_resumable(service, job, make_sink)
        return runner.stream(job, make_sink)
    group, collected = runner.whole(job)
    if (params := response_kv_params(group)) is not None:
        envelope.extensions[KV_FIELD] = params
    data = whole_response(
        group,
        collected,
        builder,
        envelope,
        includes_ids=bool(body.return_token_ids),
        prompt_logprobs=prompt_logprobs_builder(body, job.use.model),
    )
    return json_response(data)
