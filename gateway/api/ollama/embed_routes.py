"""The routes of Ollama's API that create vectors."""

from __future__ import annotations

from typing import TypeVar

from flask import Response, request

from gateway.api.encode import compute, prepare
from gateway.api.encode.compute import Embedded
from gateway.api.encode.requests import EmbeddingsBody
from gateway.api.ollama import models, responses
from gateway.api.ollama.requests import OllamaEmbedBody, OllamaPromptEmbedBody
from gateway.api.ollama.responses import nanoseconds
from gateway.api.ollama.translate import unloads
from gateway.api.openai.field_paths import translate_errors
from gateway.context import RequestContext
from gateway.http.body import convert, unknown_fields
from gateway.http.route import Routes, json_response
from gateway.service import Service
from gateway.text.inputs import TRUNCATES
from protocol.wire.errors import ContextTooLong

routes = Routes("Ollama", responses.OllamaError, scope="inference")

Body = TypeVar("Body", OllamaEmbedBody, OllamaPromptEmbedBody)


@routes.post(
    "/api/embed",
    about="Create the vectors of texts.",
    takes=(OllamaEmbedBody,),
    gives=responses.OllamaEmbedded,
)
def embed(service: Service, context: RequestContext) -> Response:
    body = _body(service, context, OllamaEmbedBody)
    rows: list[list[float]] = []
    waited_s, num_tokens = 0.0, 0
    if not body.input:
        waited_s = service.use(context, models.served_name(body.model, service.names)).waited_s
    else:
        asked = EmbeddingsBody(
            model=body.model,
            input=prepare.read_texts(body.input, "input"),
            truncate_prompt_tokens=None if body.truncate is False else -1,
            dimensions=body.dimensions,
        )
        done = _embed(service, context, asked)
        vectors = map(prepare.numbers_of, prepare.rows_of(done.vectors))
        rows = prepare.written_in_turns(
            (prepare.unit(vector[: body.dimensions]) for vector in vectors), done.vectors.shape[1]
        )
        waited_s, num_tokens = done.use.waited_s, len(done.prompt_request.prompt_ids)
    return json_response(
        responses.OllamaEmbedded(
            model=body.model,
            embeddings=rows,
            total_duration=nanoseconds(context.timeline.now_s),
            load_duration=nanoseconds(waited_s),
            prompt_eval_count=num_tokens,
        )
    )


@routes.post(
    "/api/embeddings",
    about="Create the vector of one text. POST /api/embed has replaced it.",
    takes=(OllamaPromptEmbedBody,),
    gives=responses.OllamaEmbedding,
)
def embed_prompt(service: Service, context: RequestContext) -> Response:
    body = _body(service, context, OllamaPromptEmbedBody)
    if not body.prompt:
        service.use(context, models.served_name(body.model, service.names))
        return json_response(responses.OllamaEmbedding([]))
    asked = EmbeddingsBody(model=body.model, input=body.prompt, truncate_prompt_tokens=-1)
    with translate_errors(lambda name: "prompt" if name == "input" else name):
        done = _embed(service, context, asked)
    (row,) = prepare.rows_of(done.vectors)
    return json_response(responses.OllamaEmbedding(prepare.numbers_of(row)))


def _embed(service: Service, context: RequestContext, asked: EmbeddingsBody) -> Embedded:
    name = models.served_name(asked.model or "", service.names)
    try:
        return compute.embed(service, context, asked, name, "ollama")
    except ContextTooLong as error:
        error.message = error.message.replace(TRUNCATES, "truncate: true")
        raise


def _body(service: Service, context: RequestContext, kind: type[Body]) -> Body:
    """Return the request's body. Record the fields without effect in the context."""
    with service.bodies.read(request, service.id_bounds(), any_type=True) as fields:
        body = convert(fields, kind)
        unused = unknown_fields(fields, kind)
    unloads(body.keep_alive)  # checks it
    unused += [name for name in ("keep_alive", "options") if getattr(body, name) is not None]
    context.ignored = unused
    return body
