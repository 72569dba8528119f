"""The routes that encode: embeddings, pooling, rerank, score."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

from flask import Response, request
from msgspec import UNSET

from gateway.api.encode import compute, prepare, requests, responses
from gateway.api.encode.prepare import EncodePreparation
from gateway.api.encode.requests import (
    AnyScoreBody,
    EncodeFields,
    PairFields,
    RerankBody,
    ScoreBody,
)
from gateway.api.encode.responses import EncodeUsage
from gateway.api.openai.field_paths import ignored_fields
from gateway.api.openai.responses import ErrorAnswer
from gateway.context import RequestContext
from gateway.generation.request import PromptRequest
from gateway.http.body import convert, unknown_fields
from gateway.http.json_size import JsonBounds
from gateway.http.route import Routes, json_response
from gateway.model_use import ModelUse
from gateway.served_model import ServedModel
from gateway.service import Service, offload
from protocol.engine.encoding import MAX_REQUEST_TOKENS
from protocol.wire.errors import InvalidRequest

routes = Routes("Embeddings", ErrorAnswer, scope="inference")

F = TypeVar("F", bound=EncodeFields)
BOUNDS = JsonBounds.with_ids(MAX_REQUEST_TOKENS)


@routes.post(
    "/v1/embeddings",
    about="Create the vectors of texts.",
    takes=(requests.EmbeddingsBody,),
    gives=responses.EmbeddingList,
)
def embeddings(service: Service, context: RequestContext) -> Response:
    body = _read(service, context, requests.EmbeddingsBody)
    done = compute.embed(service, context, body, body.model, "embd")
    items = (
        responses.EmbeddingItem(
            index=index,
            embedding=prepare.encoded_vector(row, body.encoding_format, body.dimensions),
        )
        for index, row in enumerate(prepare.rows_of(done.vectors))
    )
    return json_response(
        responses.EmbeddingList(
            data=prepare.written_in_turns(items, done.vectors.shape[1]),
            model=_model_name(body, done.use.model),
            usage=_usage(done.prompt_request),
            ignored_params=context.ignored or UNSET,
        )
    )


@routes.post(
    "/pooling",
    about="Create the vectors of texts, in vLLM's form.",
    takes=(requests.PoolingBody,),
    gives=responses.PooledList,
)
def pooling(service: Service, context: RequestContext) -> Response:
    body = _read(service, context, requests.PoolingBody)
    done = compute.embed(service, context, body, body.model, "pool")
    items = (
        responses.PooledItem(
            index=index,
            data=prepare.encoded_vector(row, body.encoding_format, body.dimensions),
        )
        for index, row in enumerate(prepare.rows_of(done.vectors))
    )
    return json_response(
        responses.PooledList(
            id=f"pool-{context.request_id}",
            created=int(time.time()),
            model=_model_name(body, done.use.model),
            data=prepare.written_in_turns(items, done.vectors.shape[1]),
            usage=_usage(done.prompt_request),
            ignored_params=context.ignored or UNSET,
        )
    )


@routes.post(
    "/v1/rerank",
    about="Order documents by how well they answer a query.\n"
    "A model that gives vectors orders them by similarity.",
    takes=(RerankBody,),
    gives=responses.Reranked,
)
def rerank(service: Service, context: RequestContext) -> Response:
    return _rerank(service, context, returns_documents=True)


@routes.post(
    "/rerank",
    about="As POST /v1/rerank.",
    takes=(RerankBody,),
    gives=responses.Reranked,
)
def short_rerank(service: Service, context: RequestContext) -> Response:
    return _rerank(service, context, returns_documents=True)


@routes.post(
    "/v2/rerank",
    about="As POST /v1/rerank, with the defaults of Cohere's API.",
    takes=(RerankBody,),
    gives=responses.Reranked,
)
def cohere_rerank(service: Service, context: RequestContext) -> Response:
    return _rerank(service, context, returns_documents=False)


def _rerank(service: Service, context: RequestContext, *, returns_documents: bool) -> Response:
    body = _read(service, context, RerankBody)
    documents = prepare.read_documents(body.documents)
    use = service.use(context, body.model, body, ability="score")
    preparation = EncodePreparation(body, use.model, offload)
    if body.truncate_prompt_tokens is None:
        preparation.truncate(body.max_tokens_per_doc, "max_tokens_per_doc")
    names = compute.names_of("documents", documents)
    pairs = [(body.query, document) for document in documents]
    scores, usage = _scores(service, use, context, body, preparation, pairs, names, "rerank")
    order = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n]
    if body.return_documents is not None:
        returns_documents = body.return_documents
    results = [
        responses.RerankResult(
            index=place,
            relevance_score=scores[place],
            document=responses.RerankedDocument(text=documents[place])
            if returns_documents
            else UNSET,
        )
        for place in order
    ]
    return json_response(
        responses.Reranked(
            id=f"rerank-{context.request_id}",
            model=_model_name(body, use.model),
            results=results,
            usage=usage,
            meta={"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
            ignored_params=context.ignored or UNSET,
        )
    )


@routes.post(
    "/v1/score",
    about="Score pairs of texts.\n"
    "A model that gives vectors returns the similarity of the two texts.",
    takes=tuple(requests.SIDES),
    gives=responses.ScoreList,
)
def score(service: Service, context: RequestContext) -> Response:
    body = _read_score(service, context)
    first, second = _sides(body)
    use = service.use(context, body.model, body, ability="score")
    preparation = EncodePreparation(body, use.model, offload)
    names = [f"{second.name}[{place}]" for place in range(len(second.texts))]
    ones = first.texts * len(second.texts) if len(first.texts) == 1 else first.texts
    pairs = list(zip(ones, second.texts, strict=True))
    scores, usage = _scores(service, use, context, body, preparation, pairs, names, "score")
    return json_response(
        responses.ScoreList(
            id=f"score-{context.request_id}",
            created=int(time.time()),
            model=_model_name(body, use.model),
            data=[responses.Score(index=place, score=each) for place, each in enumerate(scores)],
            usage=usage,
            ignored_params=context.ignored or UNSET,
        )
    )


@routes.post(
    "/score",
    about="As POST /v1/score.",
    takes=tuple(requests.SIDES),
    gives=responses.ScoreList,
)
def short_score(service: Service, context: RequestContext) -> Response:
    return score(service, context)


class _Side:
    """One side of the pairs: the name of its field, and its texts."""

    def __init__(self, name: str, value: object) -> None:
        self.name = name
        self.texts = prepare.read_texts(value, name)


def _read_score(service: Service, context: RequestContext) -> AnyScoreBody:
    """Return the body of a score request. Its field names decide which of three structs it is.
    Raises InvalidRequest if it has field names of two of them."""
    with service.bodies.read(request, BOUNDS) as fields:
        given = fields if isinstance(fields, dict) else {}
        kinds = [
            kind for kind, names in requests.SIDES.items() if not given.keys().isdisjoint(names)
        ]
        if len(kinds) > 1:
            names = ", or ".join(" and ".join(each) for each in requests.SIDES.values())
            first = requests.SIDES[kinds[0]][0]
            raise InvalidRequest.at(first, f"the fields must be {names}, not some of each")
        kind = kinds[0] if kinds else ScoreBody
        body, unknown = convert(fields, kind), unknown_fields(fields, kind)
    context.ignored = ignored_fields(unknown, body.strict_params)
    return body


def _sides(body: AnyScoreBody) -> tuple[_Side, _Side]:
    """Return the two sides of the pairs. Raises InvalidRequest if their numbers of texts do not
    match."""
    given = requests.SIDES[type(body)]
    first, second = (_Side(name, getattr(body, name)) for name in given)
    if len(first.texts) not in (1, len(second.texts)):
        raise InvalidRequest.at(
            first.name,
            f"{len(first.texts):,} texts, but {second.name} has {len(second.texts):,}; there must "
            "be one, or as many",
        )
    return first, second


def _scores(
    service: Service,
    use: ModelUse,
    context: RequestContext,
    body: PairFields,
    preparation: EncodePreparation,
    pairs: list[tuple[str, str]],
    names: Sequence[str],
    kind: str,
) -> tuple[list[float], EncodeUsage]:
    """Return the score of each pair: of a model that scores, its first result; otherwise the
    similarity of the two vectors."""
    instruction = _instruction(body, preparation)
    if preparation.encoding.task == "score":
        with context.timeline.tokenizing():
            prompt_request = preparation.pairs(pairs, names, instruction)
        vectors = compute.encode(service, use, context, body, prompt_request, kind)
        scores = [prepare.numbers_of(row)[0] for row in prepare.rows_of(vectors)]
        return scores, _usage(prompt_request)
    queries = list(dict.fromkeys(query for query, _ in pairs))
    query_prompt = preparation.usual_prompt(prepare.QUERY_PROMPTS)
    document_prompt = preparation.usual_prompt(prepare.DOCUMENT_PROMPTS)
    texts = [query_prompt + query for query in queries]
    texts += [document_prompt + document for _, document in pairs]
    with context.timeline.tokenizing():
        prompt_request = preparation.texts(texts, ["query"] * len(queries) + list(names))
    vectors = compute.encode(service, use, context, body, prompt_request, kind)
    width = vectors.shape[1]
    scales = preparation.encoding.similarity == "cosine" and not preparation.encoding.normalizes
    rows = [
        prepare.unit(prepare.numbers_of(row)) if scales else prepare.numbers_of(row)
        for row in prepare.in_turns(prepare.rows_of(vectors), width)
    ]
    of_query = dict(zip(queries, rows, strict=False))
    found = prepare.in_turns(zip(pairs, rows[len(queries) :], strict=True), width)
    scores = [prepare.similarity(of_query[query], row) for (query, _), row in found]
    return scores, _usage(prompt_request)


def _instruction(body: PairFields, preparation: EncodePreparation) -> str | None:
    """Return the instruction that a body gives. Raises InvalidRequest if it gives two, or one that
    the model does not take."""
    if body.instruction is not None and body.instruct is not None:
        raise InvalidRequest.at(
            "instruct", "is another name for instruction; give only one of them"
        )
    preparation.check_instruction(body.instruction, "instruction")
    preparation.check_instruction(body.instruct, "instruct")
    return body.instruct if body.instruction is None else body.instruction


def _read(service: Service, context: RequestContext, kind: type[F]) -> F:
    """Return the body. Record its fields without effect in the context."""
    body, unknown = service.bodies.parse_known(request, kind, BOUNDS)
    context.ignored = ignored_fields(unknown, body.strict_params)
    return body


def _model_name(body: EncodeFields, model: ServedModel) -> str:
    return body.model or model.names[0]


def _usage(prompt_request: PromptRequest) -> EncodeUsage:
    count = len(prompt_request.prompt_ids)
    return EncodeUsage(prompt_tokens=count, total_tokens=count)
