"""/tokenize and /detokenize, in plain text. The gateway has the tokenizer: no engine is asked."""

from __future__ import annotations

from typing import Any

import flask
import msgspec
from flask import Blueprint, Response, request

from gateway.body import decode, read_json
from gateway.service import Service, offload
from gateway.tokens import schema
from protocol.errors import InvalidRequest


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("tokens", __name__)
    routes.post("/tokenize", endpoint="tokenize")(lambda: tokenize(service))
    routes.post("/detokenize", endpoint="detokenize")(lambda: detokenize(service))
    return routes


def tokenize(service: Service) -> Response:
    body = decode(read_json(request, service.config.max_body_mib << 20), schema.tokenize_decoder)
    model = service.model(body.model)
    add_special_tokens = True if body.add_special_tokens is None else body.add_special_tokens
    ids = model.tokenizer.encode(body.prompt, add_special_tokens, offload=offload)
    answer = {"count": len(ids), "max_model_len": model.limits.max_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [model.tokenizer.token_text(token_id) for token_id in ids]
    return _json(answer)


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
