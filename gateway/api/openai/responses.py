"""Response bodies of the OpenAI routes.

msgspec encodes the fields of these structs in the order of their declaration, and omits fields that
are UNSET.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.formats.events import OutputWarning
from gateway.generation.group import ChoiceGroup
from gateway.generation.request import Choice
from gateway.http.errors import HTTPFault
from gateway.observe.timings import Timings
from gateway.text.logprobs import ChatLogprob, CompletionLogprobs

FinishReason = Literal["stop", "length", "tool_calls", "abort"]
ServiceTier = Literal["default"]
SERVICE_TIER: ServiceTier = "default"
"""The only service tier."""
_ERROR_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}
"""HTTP status -> error type. Other statuses are invalid_request_error or server_error."""


# ---- errors, warnings


class ErrorDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The `error` member of an error response.

    param  the path of the request field at fault, such as `messages[2].content`
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: ErrorDetails


def error_body(fault: HTTPFault) -> bytes:
    default = "invalid_request_error" if fault.status < 500 else "server_error"
    details = ErrorDetails(
        message=fault.message,
        type=_ERROR_TYPES.get(fault.status, default),
        param=fault.param,
        code=fault.code,
    )
    return msgspec.json.encode(ErrorAnswer(details))


class AnswerWarning(msgspec.Struct, frozen=True, kw_only=True):
    """A problem that did not prevent the answer.

    choice  the index of the choice concerned; null if the warning is about the request
    """

    code: str
    message: str
    choice: int | None

    @classmethod
    def from_event(cls, warning: OutputWarning, choice: int | None) -> AnswerWarning:
        return cls(code=warning.code, message=warning.message, choice=choice)


# ---- usage


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Details of `prompt_tokens`.

    cached_tokens  prompt tokens whose K/V was reused from the prefix cache
    """

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Details of `completion_tokens`. Unknown details are absent.

    reasoning_tokens             completion tokens that are reasoning
    accepted_prediction_tokens   completion tokens that were drafted and verified
    rejected_prediction_tokens   drafted tokens that were rejected; not part of other counts
    """

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class OpenAIUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. A prompt is counted once, even if it has several choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


def usage_of(group: ChoiceGroup) -> OpenAIUsage:
    """Return the usage so far of all choices. Each prompt is counted once."""
    details: dict[str, int] = {}
    if (reasoning := group.num_reasoning_tokens) is not None:
        details["reasoning_tokens"] = reasoning
    accepted, rejected = group.num_predictions
    if accepted or rejected:
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = rejected
    return _usage(
        group.num_prompt_tokens, group.num_generated_tokens, group.num_cached_tokens, details
    )


def usage_of_choice(group: ChoiceGroup, choice: Choice, num_tokens: int) -> OpenAIUsage:
    """Return the usage of one choice after `num_tokens` of its tokens were sent."""
    prompt = group.num_prompt_tokens
    if len(group.prompt_requests) > 1:
        prompt = len(choice.prompt_request.prompt_ids)
    details: dict[str, int] = {}
    if choice.reasoning_counter is not None:  # more may be generated than was sent
        details["reasoning_tokens"] = min(choice.reasoning_counter.count, num_tokens)
    return _usage(prompt, num_tokens, choice.num_cached, details)


def _usage(prompt: int, generated: int, cached: int, details: dict[str, int]) -> OpenAIUsage:
    return OpenAIUsage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptTokensDetails(cached),
        completion_tokens_details=CompletionTokensDetails(**details) if details else UNSET,
    )


# ---- members of responses and chunks


class TokenChance(msgspec.Struct, frozen=True, kw_only=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, TokenChance] | None]


class Effective(msgspec.Struct, frozen=True):
    """The arguments that the chat template received."""

    chat_template_kwargs: dict[str, Any]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None


class OpenAIResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The members at the start of every response and chunk.

    system_fingerprint  the server's version and the digest of the weights

    Other members that several responses and chunks have:

    ignored_params      request fields that had no effect
    timings             how long each stage took, if requested; in a stream, in the last chunk
    stop_reason         the request's stop string or stop token id that ended the choice, if any
    """

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


# ---- chat completions


class ChatResponse(OpenAIResponse, frozen=True, kw_only=True):
    service_tier: ServiceTier


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """The function that a tool call names. `arguments` is JSON text, not an object."""

    name: str
    arguments: str


class CustomText(msgspec.Struct, frozen=True, kw_only=True):
    """The custom tool that a tool call names, and the text for it."""

    name: str
    input: str


class OpenAIToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call: of a function, or of a custom tool, which takes one text."""

    id: str
    type: Literal["function", "custom"]
    function: Function | UnsetType = UNSET
    custom: CustomText | UnsetType = UNSET


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The message of a complete chat completion.

    reasoning, reasoning_content  the same text under the two names that clients use, or under one
    annotations                   always empty, because this server does not search the web
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Any]
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[OpenAIToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(ChatResponse, frozen=True, kw_only=True):
    """A complete chat completion.

    kv_transfer_params  set if the request had do_remote_decode and the engine keeps the K/V; the
                        router copies it into the request to the decode server
    """

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: OpenAIUsage
    warnings: list[AnswerWarning] | UnsetType = UNSET
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    ignored_params: list[str] | UnsetType = UNSET
    effective: Effective | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class BatchChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of a batch.

    conversation  the index of the conversation that this choice answers
    """

    index: int
    conversation: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None


class ChatBatch(ChatResponse, frozen=True, kw_only=True):
    object: Literal["chat.completion"]
    choices: list[BatchChoice]
    usage: OpenAIUsage
    warnings: list[AnswerWarning] | UnsetType = UNSET
    ignored_params: list[str] | UnsetType = UNSET
    effective: list[Effective] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class FunctionPart(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class CustomPart(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    input: str


class ToolCallPart(msgspec.Struct, frozen=True, kw_only=True):
    """A delta of a tool call. The first delta of a call has its id, type and name. The others
    append to its arguments, or to the text for a custom tool."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionPart | UnsetType = UNSET
    custom: CustomPart | UnsetType = UNSET


class MessagePart(msgspec.Struct, frozen=True, kw_only=True):
    """A delta of a message. The first delta has the role and `refusal`. The others append to the
    message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: MessagePart
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET


class ChatChunk(ChatResponse, frozen=True, kw_only=True):
    """A streamed chunk. With `include_usage`, the last chunk has the usage and no choices."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET
    ignored_params: list[str] | UnsetType = UNSET
    effective: Effective | UnsetType = UNSET
    warnings: list[AnswerWarning] | UnsetType = UNSET
    usage: OpenAIUsage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET


# ---- completions


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None


class CompletionResponse(OpenAIResponse, frozen=True, kw_only=True):
    """A complete text completion.

    kv_transfer_params  set if the request had do_remote_decode and the engine keeps the K/V; the
                        router copies it into the request to the decode server
    """

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: OpenAIUsage
    warnings: list[AnswerWarning] | UnsetType = UNSET
    ignored_params: list[str] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class CompletionChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET


class CompletionChunk(OpenAIResponse, frozen=True, kw_only=True):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    ignored_params: list[str] | UnsetType = UNSET
    warnings: list[AnswerWarning] | UnsetType = UNSET
    usage: OpenAIUsage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
