"""Request bodies of the routes that encode: OpenAI's embeddings, Jina's and Cohere's rerank, and
vLLM's score and pooling.

- A null field equals an absent field.
- Unknown fields have no effect. The response lists them, or the request is refused if it sets
  `strict_params`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from gateway.api.openai.item_schemas import TEXT_SCHEMA, member, object_schema
from gateway.api.openai.requests import GenerationBody, Priority, Timeout
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
_DOCUMENT = {
    "anyOf": [TEXT_SCHEMA, object_schema(["text"], text=member("The text of the document."))]
}
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
                             its special tokens. -1: to the most tokens that the model takes.
                             Default: a longer input is an error
    """

    described_like: ClassVar = GenerationBody

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
    """Texts to embed.

    input                a text, token ids, or a list of either. Example: ["What is a tide?"]
    encoding_format      float: each vector is a list of numbers. base64: it is the base64 text of
                         little-endian float32 numbers. Default: float
    dimensions           keep this many leading numbers of each vector, and scale it to length 1;
                         useful only for models that were trained for it. Default: all
    prompt_name          name of one of the model's prompts, which is put before each text. Default:
                         the model's default prompt
    add_special_tokens   whether to add the model's special tokens to texts. Default: true
    """

    input: Input
    encoding_format: EncodingFormat | None = None
    dimensions: Count | None = None
    prompt_name: Name | None = None
    add_special_tokens: bool | None = None


class PoolingBody(EmbeddingsBody, frozen=True, kw_only=True):
    """Texts to embed, in vLLM's form.

    task   embed: one vector for each input, the default. vLLM's other tasks, which give a vector
           for each token or the probabilities of labels, are not supported
    """

    task: Literal["embed"] | None = None


class PairFields(EncodeFields, frozen=True, kw_only=True):
    """Fields of all routes that score pairs.

    instruction   what a document must do to match a query, for models that take an instruction.
                  Default: the model's
    instruct      another name of `instruction`
    """

    instruction: PromptText | None = None
    instruct: PromptText | None = None


class RerankBody(PairFields, frozen=True, kw_only=True):
    """A query, and documents to sort by how well they match it.

    query               the text that documents are compared with. Example: "What is a tide?"
    documents           texts, or objects with a `text`. Example: ["The sea rises.", "A fruit."]
    top_n               number of results, best first. Default: all documents
    return_documents    whether results have the text of their document. Default: true, and false in
                        /v2/rerank, as in Cohere's API
    max_tokens_per_doc  another name of `truncate_prompt_tokens`, which counts the query as well
    """

    query: PromptText
    documents: Documents
    top_n: Count | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None


class ScoreBody(PairFields, frozen=True, kw_only=True):
    """Texts to compare: one with each of several, or as many as there are others, pair by pair.

    text_1  one text, or several. Example: "What is a tide?"
    text_2  the text or texts that it is compared with. Example: ["The sea rises.", "A fruit."]
    """

    text_1: Texts
    text_2: Texts


class ScoreQueriesBody(PairFields, frozen=True, kw_only=True):
    """Texts to compare, with other names.

    queries    like `text_1`
    documents  like `text_2`
    """

    queries: Texts
    documents: Texts


class ScoreDataBody(PairFields, frozen=True, kw_only=True):
    """Texts to compare, with other names.

    data_1  like `text_1`
    data_2  like `text_2`
    """

    data_1: Texts
    data_2: Texts


AnyScoreBody = ScoreBody | ScoreQueriesBody | ScoreDataBody
SIDES: dict[type[AnyScoreBody], tuple[str, str]] = {
    ScoreBody: ("text_1", "text_2"),
    ScoreQueriesBody: ("queries", "documents"),
    ScoreDataBody: ("data_1", "data_2"),
}
"""Body of a score -> the names of its two sides."""
