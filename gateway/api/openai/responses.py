"""Response bodies of the OpenAI routes, for the OpenAPI document and for tests.

`whole` and `stream` encode the responses themselves.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.observe.timings import Timings
from gateway.text.logprobs import ChatLogprob, CompletionLogprobs

FinishReason = Literal["stop", "length", "tool_calls", "abort"]
ServiceTier = Literal["default"]
"""The only tier."""


class ErrorDetails(msgspec.Struct, frozen=True, kw_only=True):
    """An error.

    param  the path of the request field at fault: `messages[2].content`
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: ErrorDetails


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """cached_tokens  prompt tokens whose K/V was reused from the prefix cache"""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Details that are unknown are absent.

    reasoning_tokens             completion tokens that are reasoning
    accepted_prediction_tokens   completion tokens that were drafted and verified
    rejected_prediction_tokens   drafted tokens that were rejected; not part of other counts
    """

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class OpenAIUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. Each prompt is counted once, whatever its number of choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TokenChance(msgspec.Struct, frozen=True, kw_only=True):
    logprob: float
    rank: int
    decoded_token: str


class AnswerWarning(msgspec.Struct, frozen=True, kw_only=True):
    """A problem that did not prevent the answer.

    choice  the index of the choice concerned; null if the warning is about the request
    """

    code: str
    message: str
    choice: int | None


class Effective(msgspec.Struct, frozen=True):
    """chat_template_kwargs  the arguments that the chat template received"""

    chat_template_kwargs: dict[str, Any]


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """Members of every response and chunk.

    system_fingerprint  the server's version and the digest of the weights
    ignored_params      request fields that had no effect
    timings             how long each stage took, if requested; in a stream, in the last chunk
    """

    id: str
    created: int
    model: str
    system_fingerprint: str
    warnings: list[AnswerWarning] | UnsetType = UNSET
    ignored_params: list[str] | UnsetType = UNSET
    effective: Effective | list[Effective] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class FinishedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """stop_reason  the request's stop string or stop token id that ended this choice, if any"""

    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """arguments  JSON text"""

    name: str
    arguments: str


class OpenAIToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"]
    function: Function


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """`reasoning` and `reasoning_content` are equal; clients use either name. `annotations` is
    always empty, because this server does not search the web."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Any]
    reasoning: str | None
    reasoning_content: str | None
    tool_calls: list[OpenAIToolCall] | UnsetType = UNSET


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None


class ChatChoice(FinishedChoice, frozen=True, kw_only=True):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(Answered, frozen=True, kw_only=True):
    """kv_transfer_params  for the decode request to another server, after do_remote_decode"""

    object: Literal["chat.completion"]
    service_tier: ServiceTier
    choices: list[ChatChoice]
    usage: OpenAIUsage
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    prompt_token_ids: list[int] | None  # type: ignore[assignment]  # narrower, and frozen
    prompt_logprobs: list[dict[str, TokenChance] | None] | None


class BatchChoice(ChatChoice, frozen=True, kw_only=True):
    """conversation  the index of the conversation that this choice answers"""

    conversation: int
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[dict[str, TokenChance] | None] | None


class ChatBatch(Answered, frozen=True, kw_only=True):
    object: Literal["chat.completion"]
    service_tier: ServiceTier
    choices: list[BatchChoice]
    usage: OpenAIUsage


class FunctionPart(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallPart(msgspec.Struct, frozen=True, kw_only=True):
    """The first delta of a call has its id, type and name; the others append to the arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionPart


class MessagePart(msgspec.Struct, frozen=True, kw_only=True):
    """The first delta has the role and `refusal`; the others append to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    logprobs: Any
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(ChunkChoice, frozen=True, kw_only=True):
    delta: MessagePart
    logprobs: ChatLogprobs | None


class ChatChunk(Answered, frozen=True, kw_only=True):
    """A streamed chunk. With `include_usage`, the last chunk has the usage and no choices."""

    object: Literal["chat.completion.chunk"]
    service_tier: ServiceTier
    choices: list[ChatChunkChoice]
    usage: OpenAIUsage | UnsetType | None = UNSET


class CompletionChoice(FinishedChoice, frozen=True, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[dict[str, TokenChance] | None] | None


class CompletionResponse(Answered, frozen=True, kw_only=True):
    """kv_transfer_params  for the decode request to another server, after do_remote_decode"""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: OpenAIUsage
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class CompletionChunkChoice(ChunkChoice, frozen=True, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(Answered, frozen=True, kw_only=True):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: OpenAIUsage | UnsetType | None = UNSET
