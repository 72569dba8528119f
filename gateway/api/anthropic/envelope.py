"""The JSON that Messages streams and complete messages share, so that they cannot differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.api.anthropic.blocks import Kind
from gateway.formats.events import Finished, OutputWarning, ToolCall
from gateway.generation.group import ChoiceGroup

encode = msgspec.json.encode

STOP_REASONS: Mapping[str, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "abort": "pause_turn",
}
CONTEXT_FULL = "model_context_window_exceeded"


@dataclass(frozen=True, slots=True)
class AnthropicEnvelope:
    """The members of a message that do not depend on the answer.

    request_id     the id in errors and headers; the message id contains it
    model          the model name from the request
    extensions     our own members, sent with the complete message or in `message_start`
    warnings       warnings about the request
    block_tokens   block size of the prefix cache; 0: there is no cache
    """

    request_id: str
    model: str
    shows_thinking: bool = True
    extensions: Mapping[str, Any] = field(default_factory=dict)
    warnings: Sequence[OutputWarning] = ()
    block_tokens: int = 0

    @property
    def id(self) -> str:
        return f"msg_{self.request_id}"

    def message(
        self,
        content: Sequence[Mapping[str, Any]],
        end: Mapping[str, Any],
        usage: Mapping[str, Any],
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **end,
            "usage": usage,
            **self.extensions,
        }


NO_END = {"stop_reason": None, "stop_sequence": None}


def end_of(finished: Finished, group: ChoiceGroup) -> dict[str, Any]:
    """Return the stop reason. An answer cut off before the request's `max_tokens` filled the
    context."""
    (choice,) = group.choices
    reason = STOP_REASONS[finished.reason]
    matched = finished.stop_reason if isinstance(finished.stop_reason, str) else None
    if finished.reason == "stop" and matched is not None:
        reason = "stop_sequence"
    limit = choice.params.max_tokens
    if finished.reason == "length" and limit is not None and choice.num_generated < limit:
        reason = CONTEXT_FULL
    return {"stop_reason": reason, "stop_sequence": matched}


def usage_of(group: ChoiceGroup, block_tokens: int) -> dict[str, Any]:
    """Return the usage so far. Each token of the prompt was read from the cache, written to it, or
    neither. `block_tokens` is the block size of the prefix cache; 0: there is no cache.

    The blocks that the same prompt can find later count as written: all that are full without the
    last token, which is always computed.
    """
    prompt, cached = group.num_prompt_tokens, group.num_cached_tokens
    cacheable = (prompt - 1) // block_tokens * block_tokens if block_tokens else 0
    written = max(0, cacheable - cached)
    usage: dict[str, Any] = {
        "input_tokens": prompt - cached - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "output_tokens": group.num_generated_tokens,
    }
    if (thinking := group.num_reasoning_tokens) is not None:
        usage["output_tokens_details"] = {"thinking_tokens": thinking}
    return usage


def usage_at_start(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Add the usage members that only `message_start` has: the service tier, and the tokens written
    per cache lifetime. No token is guaranteed to stay cached for an hour."""
    written = usage["cache_creation_input_tokens"]
    parts = {"ephemeral_5m_input_tokens": written, "ephemeral_1h_input_tokens": 0}
    return {**usage, "cache_creation": parts, "service_tier": "standard"}


def empty_block(kind: Kind, call: ToolCall | None) -> dict[str, Any]:
    """Return a block as `content_block_start` has it."""
    match kind:
        case "text":
            return {"type": kind, "text": ""}
        case "thinking":
            return {"type": kind, "thinking": "", "signature": ""}
        case "tool_use":
            assert call is not None
            return {"type": kind, "id": call.id, "name": call.name, "input": {}}


def warnings_member(warnings: Sequence[OutputWarning]) -> dict[str, Any]:
    """Return the `warnings` member, or nothing if there are none."""
    listed = [{"code": warning.code, "message": warning.message} for warning in warnings]
    return {"warnings": listed} if listed else {}
