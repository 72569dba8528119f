"""What the OpenAI routes tell, as structs: for the documentation, and for tests that hold answers
against it. The bytes themselves are put together in `whole` and `chunks`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.observe.timings import Timings
from gateway.text.logprobs import ChatLogprob, CompletionLogprobs

FinishReason = Literal["stop", "length", "tool_calls", "abort"]
ServiceTier = Literal["default"]
"""There is one."""


class ErrorDetails(msgspec.Struct, frozen=True, kw_only=True):
    """param  the request's field at fault, dotted: `messages[2].content`"""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: ErrorDetails


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """cached_tokens  found in the prefix cache, and not computed again"""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What is not told is absent.

    reasoning_tokens             how many of the answer's tokens were thinking
    accepted_prediction_tokens   how many of them had been guessed, and were computed along
    rejected_prediction_tokens   guessed tokens that are not in the answer; not counted elsewhere
    """

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class OpenAIUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Each prompt counts once, however many answers it has."""

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
    """Something is not as it should be, and was told all the same. `choice` null: the request."""

    code: str
    message: str
    choice: int | None


class Effective(msgspec.Struct, frozen=True):
    """chat_template_kwargs  what the template was told"""

    chat_template_kwargs: dict[str, Any]


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """What all answers say of themselves.

    system_fingerprint  the server's version and the digest of the weights
    ignored_params      fields of the request that had no effect
    timings             where the time went, if asked; in a stream with the last chunk, as the usage
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
    """stop_reason  the stop string or stop token of the request that ended the answer"""

    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """arguments  JSON, as text"""

    name: str
    arguments: str


class OpenAIToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"]
    function: Function


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """reasoning and reasoning_content are the same, under both names in use. Nothing is searched
    here, so there are no annotations."""

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
    """kv_transfer_params  with which another server goes on"""

    object: Literal["chat.completion"]
    service_tier: ServiceTier
    choices: list[ChatChoice]
    usage: OpenAIUsage
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    prompt_token_ids: list[int] | None  # type: ignore[assignment]  # narrower, and frozen
    prompt_logprobs: list[dict[str, TokenChance] | None] | None


class BatchChoice(ChatChoice, frozen=True, kw_only=True):
    """conversation  which of the request's it answers"""

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
    """The first part of a call brings its id, type and name, the others more of its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionPart


class MessagePart(msgspec.Struct, frozen=True, kw_only=True):
    """The first has the role and `refusal`, the others bits of the message."""

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
    """With `include_usage` the last chunk has the usage and no choices."""

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
    """kv_transfer_params  with which another server goes on"""

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
