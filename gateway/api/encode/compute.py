"""The part that all routes that encode share: use the model, tokenize, send to the engine."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.api.encode import prepare
from gateway.api.encode.prepare import EncodePreparation
from gateway.api.encode.requests import EmbeddingsBody, EncodeFields
from gateway.context import RequestContext
from gateway.generation.job import Job, RequestOptions
from gateway.generation.request import PromptRequest
from gateway.generation.vectors import VectorParser
from gateway.model_use import ModelUse
from gateway.service import Service, offload
from protocol.wire.arrays import Float32
from protocol.wire.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors of a request, one row for each input, before `dimensions`."""

    use: ModelUse
    prompt_request: PromptRequest
    vectors: Float32


def embed(
    service: Service,
    context: RequestContext,
    body: EmbeddingsBody,
    name: str | None,
    kind: str,
) -> Embedded:
    """Return the vectors that a body asks for, of the model `name`. `kind` starts the id."""
    texts, ids = prepare.read_input(body.input)
    use = service.use(context, name, body, ability="embed")
    preparation = EncodePreparation(body, use.model, offload)
    if body.dimensions is not None and body.dimensions > preparation.encoding.size:
        raise InvalidRequest.at(
            "dimensions",
            f"{body.dimensions:,} exceeds the {preparation.encoding.size:,} of this model",
        )
    with context.timeline.tokenizing():
        if texts is not None:
            prompt = preparation.prompt(body.prompt_name)
            prompt_request = preparation.texts(
                [prompt + text for text in texts],
                names_of("input", body.input),
                adds_special=body.add_special_tokens is not False,
            )
        elif ids is not None:
            if body.prompt_name is not None:
                raise InvalidRequest.at("prompt_name", "only texts have a prompt, not token ids")
            is_one = type(body.input[0]) is int
            names = ["input"] if is_one else names_of("input", body.input)
            prompt_request = preparation.ids(ids, names)
    vectors = encode(service, use, context, body, prompt_request, kind)
    return Embedded(use, prompt_request, vectors)


def encode(
    service: Service,
    use: ModelUse,
    context: RequestContext,
    body: EncodeFields,
    prompt_request: PromptRequest,
    kind: str,
) -> Float32:
    """Return the results of a request, one row for each input. Raises the error that ended it."""
    options = RequestOptions.from_body(body, f"{kind}-{context.request_id}")
    service.runner.whole(Job(use, context, [prompt_request], options))
    parser = prompt_request.parser_factory
    assert isinstance(parser, VectorParser)
    if parser.vectors is None:
        raise InvalidRequest("the request was aborted before it had ended")
    return parser.vectors


def names_of(field: str, value: object) -> list[str]:
    """Return the paths of a list's items, such as `input[0]`; `[field]` if `value` is no list."""
    return (
        [f"{field}[{place}]" for place in range(len(value))] if isinstance(value, list) else [field]
    )
