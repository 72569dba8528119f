"""Token-level routes: generate, abort_requests, tokenize, detokenize, input_tokens.

Only the first two need the engine; the gateway has the tokenizer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flask
import msgspec
from flask import Blueprint, Response, g, request

from gateway.api.openai.checks import check_chat
from gateway.api.openai.prepare import Preparation, Prompt
from gateway.api.openai.requests import ChatBody, chat_decoder
from gateway.api.tokens import generate_prepare as prepare
from gateway.api.tokens import requests
from gateway.api.tokens.generate_requests import abort_decoder, generate_decoder
from gateway.api.tokens.generate_responses import AbortedRequests
from gateway.api.tokens.generate_stream import GenerateEnvelope, GenerateStream, whole_response
from gateway.api.tokens.responses import InputTokens
from gateway.auth.caller import Caller
from gateway.context import REQUEST_ID_HEADER, RequestContext
from gateway.generation import run
from gateway.generation.group import ChoiceGroup
from gateway.http.body import decode, has_field
from gateway.http.client_socket import Outlet
from gateway.served_model import ServedModel
from gateway.service import Service, offload
from protocol.errors import RequestError
from protocol.sampling import check_token_ids


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("tokens", __name__)
    routes.post("/tokenize", endpoint="tokenize")(lambda: tokenize(service))
    routes.post("/detokenize", endpoint="detokenize")(lambda: detokenize(service))
    routes.post("/v1/chat/completions/input_tokens", endpoint="input_tokens")(
        lambda: input_tokens(service)
    )
    routes.post("/inference/v1/generate", endpoint="generate")(lambda: generate(service))
    routes.post("/inference/v1/abort_requests", endpoint="abort_requests")(
        lambda: abort_requests(service)
    )
    return routes


def tokenize(service: Service) -> Response:
    """Tokenize a text or, if the body has `messages`, a conversation."""
    with service.bodies.read(request) as data:
        decoder: msgspec.json.Decoder[Any] = requests.tokenize_decoder
        if has_field(data, "messages"):
            decoder = requests.tokenize_chat_decoder
        body = decode(data, decoder)
    if isinstance(body, requests.TokenizeChatBody):
        return _tokenize_chat(service, body)
    return _tokenize_text(service, body)


def _tokenize_text(service: Service, body: requests.TokenizeBody) -> Response:
    model = service.model(body.model)
    add_special_tokens = True if body.add_special_tokens is None else body.add_special_tokens
    ids = model.tokenizer.encode(body.prompt, add_special_tokens, offload=offload)
    return _json(_tokenized(model, ids, body.return_token_strs))


def _tokenize_chat(service: Service, body: requests.TokenizeChatBody) -> Response:
    model, prompt = _rendered(service, body)
    tokenized = _tokenized(model, prompt.ids, body.return_token_strs)
    if body.return_effective_kwargs:
        tokenized["effective"] = prompt.effective
    return _json(tokenized)


def generate(service: Service) -> Response:
    """Generate token ids from token ids."""
    with service.bodies.read(request, service.id_bounds()) as data:
        body = decode(data, generate_decoder)
        unknown = prepare.unknown(data)
    prepare.check(body, service.config.max_n)
    model = service.model(body.model)
    run.raise_cached_refusal(service)
    g.ignored = prepare.ignored_fields(unknown, body, model.limits)
    context: RequestContext = g.context
    if body.request_id is not None and REQUEST_ID_HEADER not in request.headers:
        context.request_id = body.request_id
    envelope = GenerateEnvelope.from_request(body, model, context.request_id, g.ignored)
    options = run.RequestOptions.of(body, envelope.id, prepare.namespace_of(body))
    try:
        prompt_requests = [prepare.to_request(body, model)]
        if body.stream:
            return run.stream(
                service, prompt_requests, options, partial(_generate_stream, envelope=envelope)
            )
        group, collected = run.whole(service, prompt_requests, options)
    except RequestError as error:
        raise prepare.rename_field(error, body) from None
    return flask.Response(
        whole_response(group, collected, envelope), content_type="application/json"
    )


def _generate_stream(
    group: ChoiceGroup, outlet: Outlet, *, envelope: GenerateEnvelope
) -> GenerateStream:
    return GenerateStream(group, envelope, write=outlet.write, finish=outlet.finish)


def abort_requests(service: Service) -> Response:
    """Abort requests of any API and process: the caller's own or, for an admin, any. The engine
    has the list of all requests."""
    body = service.bodies.parse(request, abort_decoder)
    service.model()
    caller: Caller = g.caller
    named = {caller.abort_label(name): name for name in body.request_ids}
    report = service.engine.abort_named(list(named))
    aborted, unknown = (
        [named[label] for label in labels] for labels in (report.aborted, report.unknown)
    )
    return _json(AbortedRequests(aborted=aborted, unknown=unknown))


def input_tokens(service: Service) -> Response:
    """Count the prompt tokens of a chat request."""
    body = service.bodies.parse(request, chat_decoder)
    _, prompt = _rendered(service, body)
    count = InputTokens(object="chat.completion.input_tokens", input_tokens=len(prompt.ids))
    return _json(count)


def _rendered(service: Service, body: ChatBody) -> tuple[ServedModel, Prompt]:
    """Render a conversation as a chat request would."""
    check_chat(body)
    model = service.model(body.model)
    trusts = service.config.trust_request_chat_template
    return model, Preparation(body, model, trusts_template=trusts).prompt(body.messages)


def _tokenized(model: ServedModel, ids: list[int], includes_strings: bool | None) -> dict[str, Any]:
    pieces = (
        [model.tokenizer.token_piece(token_id) for token_id in ids] if includes_strings else None
    )
    return {
        "count": len(ids),
        "max_model_len": model.limits.max_len,
        "tokens": ids,
        "token_strs": pieces,
    }


def detokenize(service: Service) -> Response:
    body = service.bodies.parse(request, requests.detokenize_decoder, service.id_bounds())
    model = service.model(body.model)
    check_token_ids(body.tokens, model.card.vocab_size, "tokens")
    return _json({"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _json(value: Any) -> Response:
    return flask.Response(msgspec.json.encode(value), content_type="application/json")
