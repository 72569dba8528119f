"""Response bodies in Anthropic's shape and their construction: messages, events, models, errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.anthropic.blocks import BlockKind
from gateway.api.openai.responses import Effective
from gateway.formats.events import Finished, OutputWarning, ToolCall
from gateway.generation.group import ChoiceGroup
from gateway.http.errors import HTTPFault
from gateway.model_host import ListedModel
from gateway.observe.timings import Timings, timings_of_group
from protocol.wire.errors import InvalidRequest

encode = msgspec.json.encode

StopReason = Literal[
    "end_turn",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "pause_turn",
    "model_context_window_exceeded",
]
STOP_REASONS: Mapping[str, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "abort": "pause_turn",
}
"""Finish reason -> stop reason, if no stop string matched and the context is not full."""

ErrorType = Literal[
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
ERROR_TYPES: Mapping[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""HTTP status -> error type. Other statuses are invalid_request_error or api_error."""


# ---- errors


class ErrorCode(msgspec.Struct, frozen=True):
    error_code: str


class MessagesError(msgspec.Struct, frozen=True, kw_only=True):
    """The `error` member of an error response.

    param  the path of the request field at fault, such as `messages[2].content[0]`
    """

    type: ErrorType
    message: str
    param: str | UnsetType = UNSET
    details: ErrorCode | UnsetType = UNSET


class MessagesErrorAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    error: MessagesError
    request_id: str


def _message_of(fault: HTTPFault) -> str:
    """Return an error's message. That of a prompt that is too long has Anthropic's words, which
    clients search for."""
    if (excess := fault.excess) is None:
        return fault.message
    return f"prompt {excess.words}{' with this key' if excess.is_of_key else ''}"


def error_answer(fault: HTTPFault, request_id: str) -> MessagesErrorAnswer:
    default: ErrorType = "invalid_request_error" if fault.status < 500 else "api_error"
    error = MessagesError(
        type=ERROR_TYPES.get(fault.status, default),
        message=_message_of(fault),
        param=UNSET if fault.param is None else fault.param,
        details=UNSET if fault.code is None else ErrorCode(fault.code),
    )
    return MessagesErrorAnswer(error=error, request_id=request_id)


def error_body(fault: HTTPFault, request_id: str) -> bytes:
    return encode(error_answer(fault, request_id))


# ---- usage


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Details of `output_tokens`.

    thinking_tokens  output tokens inside thinking blocks
    """

    thinking_tokens: int


class MessageDeltaUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. Each prompt token is counted in one of three fields: read from the cache,
    written to the cache, or input."""

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


def usage_of(group: ChoiceGroup, block_tokens: int) -> MessageDeltaUsage:
    """Return the usage so far. `block_tokens` is the block size of the prefix cache; 0 means that
    there is no cache.

    Uncached prompt tokens count as written to the cache if the same prompt can reuse their block
    later. The last prompt token is always computed, so the block must be full without this token.
    """
    prompt, cached = group.num_prompt_tokens, group.num_cached_tokens
    cacheable = (prompt - 1) // block_tokens * block_tokens if block_tokens else 0
    written = max(0, cacheable - cached)
    thinking = group.num_reasoning_tokens
    return MessageDeltaUsage(
        input_tokens=prompt - cached - written,
        cache_creation_input_tokens=written,
        cache_read_input_tokens=cached,
        output_tokens=group.num_generated_tokens,
        output_tokens_details=UNSET if thinking is None else OutputTokensDetails(thinking),
    )


def _full_usage(usage: MessageDeltaUsage) -> MessagesUsage:
    """Return `usage` with the members that only a message has. All cache writes are reported as
    five-minute writes, because no token is guaranteed to stay cached for an hour."""
    written = CacheCreation(
        ephemeral_5m_input_tokens=usage.cache_creation_input_tokens, ephemeral_1h_input_tokens=0
    )
    counts = msgspec.structs.asdict(usage)
    return MessagesUsage(**counts, cache_creation=written, service_tier="standard")


# ---- messages


class TextBlock(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking"):
    """A block of reasoning.

    signature  a digest of the text; it is not checked when the block is sent back
    """

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


def content_block(
    kind: BlockKind, call: ToolCall | None, text: str = "", signature: str = ""
) -> ContentBlock:
    """Return a content block. Without `text` it is the empty block that `content_block_start`
    contains.

    call  required if `kind` is "tool_use"; `text` is then the JSON text of an object, which is sent
          unchanged
    """
    match kind:
        case "text":
            return TextBlock(text)
        case "thinking":
            return ThinkingBlock(text, signature)
    assert call is not None
    arguments = cast("dict[str, Any]", msgspec.Raw(text.encode() or b"{}"))
    return ToolUseBlock(call.id, call.name, arguments)


class MessagesWarning(msgspec.Struct, frozen=True, kw_only=True):
    """A problem that did not prevent the answer."""

    code: str
    message: str


class MessageEnd(msgspec.Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


def end_of(finished: Finished, group: ChoiceGroup) -> MessageEnd:
    """Return the stop reason and the stop sequence. If the answer was cut off before it reached
    `max_tokens` tokens, the reason is `model_context_window_exceeded`."""
    (choice,) = group.choices
    reason = STOP_REASONS[finished.reason]
    matched = finished.stop_reason if isinstance(finished.stop_reason, str) else None
    if finished.reason == "stop" and matched is not None:
        reason = "stop_sequence"
    limit = choice.params.max_tokens
    if finished.reason == "length" and limit is not None and choice.num_generated < limit:
        reason = "model_context_window_exceeded"
    return MessageEnd(reason, matched)


class AnsweredMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message: the response of /v1/messages, and part of `message_start`.

    ignored_params  request fields that had no effect
    """

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    ignored_params: list[str] | UnsetType = UNSET
    effective: Effective | UnsetType = UNSET
    warnings: list[MessagesWarning] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class AnthropicEnvelope:
    """The members of a message that do not depend on the answer, and options for the others."""

    #: The id in errors and headers. The message id contains it.
    request_id: str
    #: The model name from the request.
    model: str
    shows_thinking: bool = True
    #: Members that Anthropic does not define. Sent with a complete message or in `message_start`.
    extensions: Mapping[str, Any] = field(default_factory=dict)
    #: Warnings about the request.
    warnings: Sequence[OutputWarning] = ()
    #: Block size of the prefix cache; 0: there is no cache.
    block_tokens: int = 0

    @property
    def id(self) -> str:
        return f"msg_{self.request_id}"

    def message_at_start(self, group: ChoiceGroup) -> AnsweredMessage:
        """Return the message that `message_start` contains: no content, and the usage so far."""
        return AnsweredMessage(
            id=self.id,
            type="message",
            role="assistant",
            model=self.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=_full_usage(usage_of(group, self.block_tokens)),
            **self.extensions,
        )

    def message(
        self,
        group: ChoiceGroup,
        content: list[ContentBlock],
        finished: Finished,
        warnings: Sequence[OutputWarning],
    ) -> AnsweredMessage:
        """Return the complete message.

        content   the blocks of the answer
        warnings  warnings about the answer; those about the request are added
        """
        end = end_of(finished, group)
        return msgspec.structs.replace(
            self.message_at_start(group),
            content=content,
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
            warnings=self.all_warnings(warnings),
            timings=timings_of_group(group),
        )

    def all_warnings(self, of_answer: Sequence[OutputWarning]) -> list[MessagesWarning] | UnsetType:
        """Return the warnings about the request and those about the answer; UNSET if there are
        none."""
        return [
            MessagesWarning(code=warning.code, message=warning.message)
            for warning in [*self.warnings, *of_answer]
        ] or UNSET


class InputTokenCount(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    ignored_params: list[str] | UnsetType = UNSET
    effective: Effective | UnsetType = UNSET


# ---- events of a stream


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
    """Part of a call's `input`. The deltas of a block, joined, are the JSON text of an object."""

    partial_json: str


class ContentBlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, frozen=True, tag="content_block_stop"):
    index: int


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


# ---- models

VERSION_HEADER = "anthropic-version"
"""GET /v1/models responds in Anthropic's shape if the request has this header."""
DEFAULT_LIMIT = 20
MAX_LIMIT = 1000
_NUMBER = re.compile(r"[0-9]{1,4}")


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, tag="model"):
    """A served model.

    id                            one of the model's served names, perhaps the operator's alias
    display_name                  the model's own name
    created_at                    when the server started to serve the model: ISO 8601, in UTC
    max_input_tokens, max_tokens  the context length, for prompt and answer together
    """

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    lifecycle: Literal["active"]


class ModelPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of served models.

    first_id, last_id  the first and the last id in `data`; null if `data` is empty
    """

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_info(facts: ListedModel, name: str) -> ModelInfo:
    """Return the description of a model under `name`, which is one of its served names."""
    since = datetime.fromtimestamp(facts.created_at, UTC)
    return ModelInfo(
        id=name,
        display_name=name if facts.parent else facts.root,
        created_at=since.isoformat().replace("+00:00", "Z"),
        max_input_tokens=facts.max_len,
        max_tokens=facts.max_len,
        lifecycle="active",
    )


def model_page(listed: Mapping[str, ListedModel], query: Mapping[str, str]) -> ModelPage:
    """Return a page of at most `limit` models, listed after `after_id` and before `before_id`. All
    three are parameters of `query`. Raise InvalidRequest, naming the parameter, if one is invalid.

    listed  the models by all their names
    """
    limit = _limit(query.get("limit", ""))
    names, is_backward = list(listed), False
    if after := query.get("after_id"):
        names = names[_place(names, after, "after_id") + 1 :]
    if before := query.get("before_id"):
        names, is_backward = names[: _place(names, before, "before_id")], True
    shown = names[-limit:] if is_backward else names[:limit]
    return ModelPage(
        data=[model_info(listed[name], name) for name in shown],
        has_more=len(shown) < len(names),
        first_id=shown[0] if shown else None,
        last_id=shown[-1] if shown else None,
    )


def _limit(text: str) -> int:
    if not text:
        return DEFAULT_LIMIT
    limit = int(text) if _NUMBER.fullmatch(text) else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidRequest.wrong("limit", f"a whole number from 1 to {MAX_LIMIT:,}", text)
    return limit


def _place(names: list[str], name: str, param: str) -> int:
    if name not in names:
        raise InvalidRequest.at(param, f"no model {name!r} is listed")
    return names.index(name)
