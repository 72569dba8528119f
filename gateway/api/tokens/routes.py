"""Token-level routes: generate, abort_requests, tokenize and others about the tokenizer.

Only generate and abort_requests use the engine: the tokenizer is in the gateway.
"""

from __future__ import annotations

from functools import partial

from flask import Response, request
from msgspec import UNSET, UnsetType

from gateway.api.openai.checks import check_chat
from gateway.api.openai.field_paths import translate_errors
from gateway.api.openai.prepare import Preparation, Prompt
from gateway.api.openai.requests import ChatBody
from gateway.api.openai.responses import Effective, ErrorAnswer
from gateway.api.tokens import prepare, requests, responses
from gateway.api.tokens.requests import AbortBody, GenerateBody
from gateway.api.tokens.responses import (
    AbortedRequests,
    GenerateChunk,
    GenerateResponse,
    GenerateTextChunk,
    GenerateTextResponse,
)
from gateway.api.tokens.stream import GenerateEnvelope, GenerateStream, whole_response
from gateway.context import REQUEST_ID_HEADER, RequestContext
from gateway.generation.job import Job, RequestOptions
from gateway.generation.kv_params import parse_kv_params
from gateway.http.body import convert
from gateway.http.route import Parameter, Routes, Stream, json_response
from gateway.served_model import ServedModel
from gateway.service import Service, offload
from gateway.store.uploaded_images import UploadedImages
from gateway.text.tokenizer import Tokenizer
from protocol.engine.sampling import check_token_ids

routes = Routes("Tokens", ErrorAnswer, scope="inference")


@routes.post(
    "/tokenize",
    about="Tokenize a text or a conversation.\n"
    "A conversation is rendered as a chat request with the same fields would be. A body with "
    "`content` has llama.cpp's form.",
    takes=(requests.TokenizeBody, requests.TokenizeChatBody, requests.TokenizeContentBody),
    gives=(responses.Tokenized, responses.TokenizedContent),
)
def tokenize(service: Service, context: RequestContext) -> Response:
    """Tokenize a text or, if the body has `messages`, a conversation."""
    body: requests.TokenizeBody | requests.TokenizeChatBody | requests.TokenizeContentBody
    with service.bodies.read(request) as fields:
        if isinstance(fields, dict) and "messages" in fields:
            body = convert(fields, requests.TokenizeChatBody)
        elif isinstance(fields, dict) and "content" in fields:
            body = convert(fields, requests.TokenizeContentBody)
        else:
            body = convert(fields, requests.TokenizeBody)
    if isinstance(body, requests.TokenizeChatBody):
        return _tokenize_chat(service, context, body)
    if isinstance(body, requests.TokenizeContentBody):
        return _tokenize_content(service, context, body)
    return _tokenize_text(service, context, body)


def _tokenize_text(
    service: Service, context: RequestContext, body: requests.TokenizeBody
) -> Response:
    model = service.use(context, body.model).model
    add_special_tokens = True if body.add_special_tokens is None else body.add_special_tokens
    ids = model.tokenizer.encode(body.prompt, add_special_tokens, offload=offload)
    return json_response(_tokenized(model, ids, body.return_token_strs, UNSET))


def _tokenize_content(
    service: Service, context: RequestContext, body: requests.TokenizeContentBody
) -> Response:
    tokenizer = service.use(context, body.model).model.tokenizer
    add_special = bool(body.add_special)
    ids = tokenizer.encode(body.content, add_special, offload=offload, param="content")
    if not body.with_pieces:
        return json_response(responses.TokenizedContent([*ids]))
    return json_response(responses.TokenizedContent([_piece(tokenizer, each) for each in ids]))


def _piece(tokenizer: Tokenizer, token_id: int) -> responses.TokenPiece:
    data = tokenizer.token_bytes(token_id)
    try:
        return responses.TokenPiece(token_id, data.decode())
    except UnicodeDecodeError:
        return responses.TokenPiece(token_id, list(data))


def _tokenize_chat(
    service: Service, context: RequestContext, body: requests.TokenizeChatBody
) -> Response:
    model, prompt = _rendered(service, context, body)
    effective = prompt.effective if body.return_effective_kwargs else UNSET
    return json_response(_tokenized(model, prompt.ids, body.return_token_strs, effective))


@routes.post(
    "/inference/v1/generate",
    about="Generate token ids from token ids.\n"
    "With output_mode `text`, choices also have text, and logprobs in the shape of a chat's.",
    takes=(GenerateBody,),
    gives=GenerateResponse | GenerateTextResponse,
    streams=Stream(GenerateChunk | GenerateTextChunk, ends_with="[DONE]"),
    parameters=(
        Parameter(
            "X-Request-Id", "The request's id; takes precedence over `request_id`.", "header"
        ),
    ),
)
def generate(service: Service, context: RequestContext) -> Response:
    with service.bodies.read(request, service.id_bounds()) as fields:
        body = convert(fields, GenerateBody)
        unknown = prepare.list_unknown_fields(fields)
    prepare.check(body, service.config.max_n)
    use = service.use(context, body.model, body)
    model = use.model
    kv_params = parse_kv_params(body.kv_transfer_params, model.limits)
    context.ignored = prepare.list_ignored_fields(unknown, body, kv_params)
    if body.request_id is not None and not context.headers.get(REQUEST_ID_HEADER, ""):
        context.request_id = body.request_id
    envelope = GenerateEnvelope.from_request(body, model, context.request_id, context.ignored)
    options = RequestOptions.from_body(body, envelope.id, prepare.namespace_of(body))
    with translate_errors(prepare.request_path, prepare.engine_fields_of(body)):
        job = Job(use, context, [prepare.to_request(body, model, kv_params)], options)
        if body.stream:
            return service.runner.stream(job, partial(GenerateStream, envelope=envelope))
        group, collected = service.runner.whole(job)
    return json_response(whole_response(group, collected, envelope))


@routes.post(
    "/inference/v1/abort_requests",
    about="Abort requests of any API by their response ids.\n"
    "Their choices end with finish_reason `abort`. A key can abort its own requests; one with "
    "the scope `admin` can abort any.",
    takes=(AbortBody,),
    gives=AbortedRequests,
)
def abort_requests(service: Service, context: RequestContext) -> Response:
    """Abort requests by their ids: the caller's own or, for an admin, any.

    An engine has the requests of all APIs and all gateway processes. So this also aborts requests
    that other processes have sent. The ids do not show the model, so all engines are asked.
    """
    body = service.bodies.parse(request, AbortBody)
    caller = context.caller
    named = {caller.abort_label(name): name for name in body.request_ids}
    hosts, trouble = service.ready_hosts, service.trouble()
    if trouble is not None and not hosts:
        raise trouble
    reports = [host.engine.abort_by_label(list(named)) for host in hosts]
    found = {label for report in reports for label in report.aborted}
    return json_response(
        AbortedRequests(
            aborted=[name for label, name in named.items() if label in found],
            unknown=[name for label, name in named.items() if label not in found],
        )
    )


@routes.post(
    "/v1/chat/completions/input_tokens",
    about="Count the prompt tokens of a chat request.",
    takes=(ChatBody,),
    gives=responses.InputTokens,
)
def input_tokens(service: Service, context: RequestContext) -> Response:
    body = service.bodies.parse(request, ChatBody)
    _, prompt = _rendered(service, context, body)
    count = responses.InputTokens(
        object="chat.completion.input_tokens", input_tokens=len(prompt.ids)
    )
    return json_response(count)


def _rendered(
    service: Service, context: RequestContext, body: ChatBody
) -> tuple[ServedModel, Prompt]:
    """Return the model and the rendered prompt of a chat request."""
    check_chat(body)
    model = service.use(context, body.model).model
    trusts = service.config.trust_request_chat_template
    files = UploadedImages(service.files, context.caller.owner)
    preparation = Preparation(body, model, trusts_template=trusts, files=files)
    return model, preparation.prompt(body.messages)


def _tokenized(
    model: ServedModel,
    ids: list[int],
    includes_strings: bool | None,
    effective: Effective | UnsetType,
) -> responses.Tokenized:
    return responses.Tokenized(
        count=len(ids),
        max_model_len=model.limits.max_len,
        tokens=ids,
        token_strs=list(map(model.tokenizer.token_piece, ids)) if includes_strings else None,
        effective=effective,
    )


@routes.get(
    "/tokenizer_info",
    about="Describe the tokenizer: its special tokens and the chat template.",
    gives=responses.TokenizerInfo,
    parameters=(Parameter("model", "One of several models; by default the only one."),),
)
def tokenizer_info(service: Service, context: RequestContext) -> Response:
    model = service.use(context, request.args.get("model")).model
    return json_response(_tokenizer_info(model))


def _tokenizer_info(model: ServedModel) -> responses.TokenizerInfo:
    card, names = model.card, responses.TokenizerInfo.__struct_fields__
    tokens: dict[str, str] = {
        name: text for name, text in card.special_tokens.items() if name in names
    }
    ids = {"bos_token": card.bos_token_id, "pad_token": card.pad_token_id}
    ids["eos_token"] = next(iter(card.eos_token_ids), None)
    for name, token_id in ids.items():
        text = None if token_id is None else model.tokenizer.inner.id_to_token(token_id)
        if text is not None:
            tokens.setdefault(name, text)
    return responses.TokenizerInfo(
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=model.limits.max_len,
        chat_template=UNSET if card.chat_template is None else card.chat_template,
        **tokens,
    )


@routes.post(
    "/detokenize",
    about="Convert token ids to text.",
    takes=(requests.DetokenizeBody,),
    gives=responses.Detokenized,
)
def detokenize(service: Service, context: RequestContext) -> Response:
    body = service.bodies.parse(request, requests.DetokenizeBody, service.id_bounds())
    model = service.use(context, body.model).model
    check_token_ids(body.tokens, model.card.vocab_size, "tokens")
    text = model.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return json_response(responses.Detokenized(prompt=text, content=text))
