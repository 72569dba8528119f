"""Request bodies of the routes that encode: OpenAI's embeddings, Jina's and Cohere's rerank, and
vLLM's score and pooling.

- A null field equals an absent field.
- Unknown fields have no effect. The response lists them, or the request is refused if it sets
  `strict_params`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.api.openai.requests import TEXT_SCHEMA, Priority, Timeout, object_schema
from gateway.http.text_fields import Label, Name, PromptText
from protocol.engine.sampling import MAX_TOKENS

_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_INPUT = {
    "anyOf": [
        TEXT_SCHEMA,
        _IDS,
        {"type": "array", "items": TEXT_SCHEMA, "minItems": 1},
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
_DOCUMENT = {"anyOf": [TEXT_SCHEMA, object_schema(["text"], text=TEXT_SCHEMA)]}
_TEXTS = {"anyOf": [TEXT_SCHEMA, {"type": "array", "items": TEXT_SCHEMA, "minItems": 1}]}

Input = Annotated[Any, Meta(extra_json_schema=_INPUT)]
"""A text, a list of texts, a list of token ids, or a list of such lists."""
Documents = Annotated[
    Any, Meta(extra_json_schema={"type": "array", "items": _DOCUMENT, "minItems": 1})
]
"""Texts, or objects with a text."""
Texts = Annotated[Any, Meta(extra_json_schema=_TEXTS)]
"""A text or a list of texts."""
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Truncation = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)]
EncodingFormat = Literal["float", "base64"]


class EncodeFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of all routes that encode.

    truncate_prompt_tokens   shorten each longer input to this many tokens, at its end and without
                             its special tokens; -1: to the most tokens that the model takes. If
                             absent, a longer input is an error
    priority                 lower values are served first
    timeout_s, queue_timeout_s   limits in seconds on the total time and the time in the queue; see
                             docs/operate/load.md
    user                     without effect
    strict_params            refuse fields that have no effect
    """

    model: Name | None = None
    truncate_prompt_tokens: Truncation | None = None
    priority: Priority | None = None
    timeout_s: Timeout | None = None
    queue_timeout_s: Timeout | None = None
    user: Label | None = None
    strict_params: bool | None = None

    #: What `RequestOptions.from_body` also reads. No answer of these routes depends on it.
    @property
    def cache_salt(self) -> str | None:
        return None

    @property
    def timings(self) -> bool | None:
        return None


class EmbeddingsBody(EncodeFields, frozen=True, kw_only=True):
    """The body of POST /v1/embeddings.

    encoding_format      base64: each vector is the base64 text of little-endian float32 numbers
    dimensions           keep this many leading numbers of each vector, and scale it to length 1;
                         useful only for models that were trained for it
    prompt_name          name of one of the model's prompts, which is put before each text; absent:
                         the model's default prompt
    add_special_tokens   false: do not add the model's special tokens to texts
    """

    input: Input
    encoding_format: EncodingFormat | None = None
    dimensions: Count | None = None
    prompt_name: Name | None = None
    add_special_tokens: bool | None = None


class PoolingBody(EmbeddingsBody, frozen=True, kw_only=True):
    """The body of POST /pooling: that of embeddings, in vLLM's form.

    task   embed: one vector for each input. vLLM's other tasks, which give a vector for each token
           or the probabilities of labels, are not supported
    """

    task: Literal["embed"] | None = None


class PairFields(EncodeFields, frozen=True, kw_only=True):
    """Fields of all routes that score pairs.

    instruction   what a document must do to match a query, for models that take an instruction;
                  absent: the model's default one
    instruct      another name for instruction
    """

    instruction: PromptText | None = None
    instruct: PromptText | None = None


class RerankBody(PairFields, frozen=True, kw_only=True):
    """The body of POST /v1/rerank, /v2/rerank and /rerank.

    top_n               number of results, best first; absent: all documents
    return_documents    whether results have the text of their document; absent: true, and false in
                        /v2/rerank, as in Cohere's API
    max_tokens_per_doc  another name of truncate_prompt_tokens, which counts the query as well
    """

    query: PromptText
    documents: Documents
    top_n: Count | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None


class ScoreBody(PairFields, frozen=True, kw_only=True):
    """The body of POST /v1/score and /score: one text against each of several, or as many texts as
    there are others, pair by pair."""

    text_1: Texts
    text_2: Texts


class ScoreQueriesBody(PairFields, frozen=True, kw_only=True):
    """The same with other names."""

    queries: Texts
    documents: Texts


class ScoreDataBody(PairFields, frozen=True, kw_only=True):
    """The same with other names."""

    data_1: Texts
    data_2: Texts


AnyScoreBody = ScoreBody | ScoreQueriesBody | ScoreDataBody
SIDES: dict[type[AnyScoreBody], tuple[str, str]] = {
    ScoreBody: ("text_1", "text_2"),
    ScoreQueriesBody: ("queries", "documents"),
    ScoreDataBody: ("data_1", "data_2"),
}
"""Body of a score -> the names of its two sides."""
