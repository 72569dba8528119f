"""/tokenize and /detokenize: texts and chats. The gateway has the tokenizer; no engine is asked."""

from __future__ import annotations

from typing import Any

import flask
import msgspec
from flask import Blueprint, Response, request

from gateway.body import decode, has_field, read_json
from gateway.openai.checks import check_chat
from gateway.openai.prepare import Preparation
from gateway.served import ServedModel
from gateway.service import Service, offload
from gateway.tokens import schema
from protocol.errors import InvalidRequest


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("tokens", __name__)
    routes.post("/tokenize", endpoint="tokenize")(lambda: tokenize(service))
    routes.post("/detokenize", endpoint="detokenize")(lambda: detokenize(service))
    return routes


def tokenize(service: Service) -> Response:
    """Of a text, or of a conversation: what a chat request with these fields would send."""
    data = read_json(request, service.config.max_body_mib << 20)
    if has_field(data, "messages"):
        return _tokenize_chat(service, data)
    body = decode(data, schema.tokenize_decoder)
    model = service.model(body.model)
    add_special_tokens = True if body.add_special_tokens is None else body.add_special_tokens
    ids = model.tokenizer.encode(body.prompt, add_special_tokens, offload=offload)
    return _json(_tokenized(model, ids, body.return_token_strs))


def _tokenize_chat(service: Service, data: bytes) -> Response:
    body = decode(data, schema.tokenize_chat_decoder)
    check_chat(body)
    model = service.model(body.model)
    trusts = service.config.trust_request_chat_template
    prompt = Preparation(body, model, trusts_template=trusts).prompt(body.messages)
    answer = _tokenized(model, prompt.ids, body.return_token_strs)
    if body.return_effective_kwargs:
        answer["effective"] = prompt.effective
    return _json(answer)


def _tokenized(model: ServedModel, ids: list[int], tells_strs: bool | None) -> dict[str, Any]:
    answer = {"count": len(ids), "max_model_len": model.limits.max_len, "tokens": ids}
    if tells_strs:
        answer["token_strs"] = [model.tokenizer.token_text(token_id) for token_id in ids]
    return answer


def detokenize(service: Service) -> Response:
    body = decode(read_json(request, service.config.max_body_mib << 20), schema.detokenize_decoder)
    model = service.model(body.model)
    worst = max(body.tokens, default=0)
    if worst >= model.card.vocab_size:
        raise InvalidRequest(
            f"token id {worst} is not in the vocabulary of {model.card.vocab_size} tokens",
            param="tokens",
        )
    return _json({"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _json(value: dict[str, Any]) -> Response:
    return flask.Response(msgspec.json.encode(value), content_type="application/json")
