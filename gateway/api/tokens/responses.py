"""Response bodies of the token-level routes. Names and shapes are vLLM's.

- A complete response has every field. A field is null if it has no value, or if this server does
  not support it.
- `system_fingerprint` and `weights_digest` are our own fields.
- `output_mode` is the tag of the two shapes, "tokens" and "text". "tokens" is the default.
- All fields that vLLM may omit have a default, so these structs can decode vLLM's responses too.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.openai.responses import (
    AnswerWarning,
    ChatLogprobs,
    CompletionTokensDetails,
    Effective,
    PromptTokensDetails,
    TokenChance,
)
from gateway.observe.timings import Timings

FinishReason = Literal["stop", "length", "abort"]


class GenerateUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. The prompt is counted once for all choices. In a chunk of one choice, the
    counts are those of the choice."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class TopToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token with its logprob.

    rank              1 for the most likely token; null if unknown
    sampling_logprob  logprob in the distribution sampled from, if both were requested
    """

    token_id: int
    logprob: float
    rank: int | None = None
    sampling_logprob: float | UnsetType = UNSET


class ChosenToken(TopToken, frozen=True, kw_only=True):
    """A sampled token.

    top_logprobs  the sampled token, then the top tokens, then those of logprob_token_ids
    """

    top_logprobs: list[TopToken] = []


class TokensLogprobs(msgspec.Struct, frozen=True):
    content: list[ChosenToken]


class GeneratedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice in mode "tokens", in a chunk or a complete response.

    stop_reason  the request's stop string or stop token id that ended this choice, if any
    """

    index: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int]
    routed_experts: Any = None
    sampling_mask: Any = None
    weight_versions: Any = None
    logprobs: TokensLogprobs | None = None


class GeneratedTextChoice(GeneratedChoice, frozen=True, kw_only=True):
    """A choice in mode "text". Its logprobs have the shape of a chat's."""

    text: str
    logprobs: ChatLogprobs | None = None  # type: ignore[assignment]  # narrower, and frozen


class GenerateResponse(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="output_mode", tag="tokens"
):
    """A complete response in mode "tokens".

    kv_transfer_params  after do_remote_decode, the value to put into the decode request to another
                        server; null if no K/V is kept
    """

    request_id: str
    model: str | None = None
    created: int | None = None
    system_fingerprint: str | UnsetType = UNSET
    weights_digest: str | UnsetType = UNSET
    usage: GenerateUsage | None = None
    prompt_logprobs: list[dict[str, TokenChance] | None] | None = None
    prompt_token_id_logprobs: Any = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: Any = None
    metrics: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    ignored_params: list[str] | UnsetType = UNSET
    warnings: list[AnswerWarning] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    choices: list[GeneratedChoice]


class GenerateTextResponse(GenerateResponse, frozen=True, kw_only=True, tag="text"):
    """A complete response in mode "text"."""

    choices: list[GeneratedTextChoice]  # type: ignore[assignment]  # narrower, and frozen


class GenerateChunk(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="output_mode", tag="tokens"
):
    """A chunk in mode "tokens": a delta of one choice or, without choices, the total usage.

    prompt_token_ids    in the first chunk, if requested
    weights_digest, kv_transfer_params   in a choice's last chunk, and with the total usage
    warnings            in a choice's last chunk
    """

    request_id: str
    system_fingerprint: str | UnsetType = UNSET
    weights_digest: str | UnsetType = UNSET
    usage: GenerateUsage | None = None
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType | None = UNSET
    ignored_params: list[str] | UnsetType = UNSET
    warnings: list[AnswerWarning] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    choices: list[GeneratedChoice]


class GenerateTextChunk(GenerateChunk, frozen=True, kw_only=True, tag="text"):
    """A chunk in mode "text"."""

    choices: list[GeneratedTextChoice]  # type: ignore[assignment]  # narrower, and frozen


class AbortedRequests(msgspec.Struct, frozen=True, kw_only=True):
    """The result of abort_requests. Each id of the request is in one of the two lists, in the order
    of the request."""

    aborted: list[str]
    unknown: list[str]


# ---- tokenize, detokenize


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a text or a rendered conversation.

    token_strs  each token as the vocabulary spells it ("Ġworld"); null unless requested
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    effective: Effective | UnsetType = UNSET


class TokenPiece(msgspec.Struct, frozen=True):
    """A token and its text, or its bytes if they are not whole characters."""

    id: int
    piece: str | list[int]


class TokenizedContent(msgspec.Struct, frozen=True):
    """The tokens of a text in llama.cpp's form."""

    tokens: list[int | TokenPiece]


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model's tokenizer, with the names of tokenizer_config.json.

    tokenizer_class   the class of transformers that reads the model's tokenizer.json
    model_max_length  most tokens of prompt and answer together
    chat_template     Jinja source of the chat template
    """

    tokenizer_class: Literal["PreTrainedTokenizerFast"]
    model_max_length: int
    bos_token: str | UnsetType = UNSET
    eos_token: str | UnsetType = UNSET
    unk_token: str | UnsetType = UNSET
    sep_token: str | UnsetType = UNSET
    pad_token: str | UnsetType = UNSET
    cls_token: str | UnsetType = UNSET
    mask_token: str | UnsetType = UNSET
    chat_template: str | UnsetType = UNSET


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The number of prompt tokens of a chat request."""

    object: Literal["chat.completion.input_tokens"]
    input_tokens: int


class Detokenized(msgspec.Struct, frozen=True):
    """The text of tokens, under vLLM's name and under llama.cpp's."""

    prompt: str
    content: str
