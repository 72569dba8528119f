"""Response bodies of the Messages routes, for the OpenAPI document and for tests.

`whole` and `stream` encode the responses themselves.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.openai.responses import Effective
from gateway.observe.timings import Timings

StopReason = Literal[
    "end_turn",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "pause_turn",
    "model_context_window_exceeded",
]


class ErrorCode(msgspec.Struct, frozen=True):
    error_code: str


class MessagesError(msgspec.Struct, frozen=True, kw_only=True):
    """param  the path of the request field at fault: `messages[2].content[0]`"""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "conflict_error",
        "request_too_large",
        "rate_limit_error",
        "overloaded_error",
        "timeout_error",
        "api_error",
    ]
    message: str
    param: str | UnsetType = UNSET
    details: ErrorCode | UnsetType = UNSET


class MessagesErrorAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    error: MessagesError
    request_id: str


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """thinking_tokens  output tokens that are thinking"""

    thinking_tokens: int


class MessageDeltaUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. Each prompt token is counted once: as read from the cache, as written to it,
    or as input."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET


class CacheCreation(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens written to the cache. Their lifetime is not guaranteed."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: Literal[0]


class MessagesUsage(MessageDeltaUsage, frozen=True, kw_only=True):
    cache_creation: CacheCreation
    service_tier: Literal["standard"]


class TextBlock(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking"):
    """signature  a digest of the text; it is not checked when the block is sent back"""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesWarning(msgspec.Struct, frozen=True, kw_only=True):
    """A problem that did not prevent the answer."""

    code: str
    message: str


class AnsweredMessage(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    """ignored_params  request fields that had no effect"""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    warnings: list[MessagesWarning] | UnsetType = UNSET
    ignored_params: list[str] | UnsetType = UNSET
    effective: Effective | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class MessageStart(msgspec.Struct, frozen=True, tag="message_start"):
    message: AnsweredMessage


class AnthropicPing(msgspec.Struct, frozen=True, tag="ping"):
    pass


class ContentBlockStart(msgspec.Struct, frozen=True, tag="content_block_start"):
    index: int
    content_block: ContentBlock


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag="input_json_delta"):
    """The deltas of a block add up to the JSON text of its `input`."""

    partial_json: str


class ContentBlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, frozen=True, tag="content_block_stop"):
    index: int


class MessageEnd(msgspec.Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True, tag="message_delta"):
    """The stop reason, and the usage of the complete answer."""

    delta: MessageEnd
    usage: MessageDeltaUsage
    warnings: list[MessagesWarning] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop"):
    pass


StreamEvent = (
    MessageStart
    | AnthropicPing
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | MessagesErrorAnswer
)


class InputTokenCount(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    ignored_params: list[str] | UnsetType = UNSET
    effective: Effective | UnsetType = UNSET


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, tag="model"):
    """A served model.

    display_name       the model's own name; `id` may be an alias set by the operator
    created_at         when the server began to serve it
    max_input_tokens   the context length for prompt and answer together; so is `max_tokens`
    """

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    lifecycle: Literal["active"]


class ModelPage(msgspec.Struct, frozen=True, kw_only=True):
    """first_id, last_id  ids in `data`; null if it is empty"""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None
