"""Checks across the fields of a chat or completion body.

An unsupported field that would change the answer is refused, never ignored. All functions raise
InvalidRequest naming the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.api.openai.requests import (
    BatchBody,
    ChatBody,
    CompletionBody,
    OpenEndedCompletion,
    unsupported,
)
from gateway.api.openai.structured import FORM_FIELDS
from gateway.http.json_values import check_depth
from protocol.wire.errors import InvalidRequest

_NESTED = (
    "tools",
    "tool_choice",
    "documents",
    "chat_template_kwargs",
    "reasoning",
    "thinking",
)
_REFUSED = {
    "guided_whitespace_pattern": "JSON values are separated by at most 8 blanks",
    "grammar_lazy": "set `strict: true` on a tool to enforce its arguments",
    "grammar_triggers": "use the triggers of structural_tag",
}
"""Unsupported field -> advice in the error."""
_REPLACED = {
    "functions": 'use `tools`, with each function as {"type": "function", "function": ...}',
    "function_call": "use `tool_choice`",
    "audio": "this model writes text only",
}
"""Unsupported field of a conversation -> advice in the error."""
_REASONING_MEMBERS = ("effort", "enabled", "max_tokens")
_THINKING_MEMBERS = ("type", "budget_tokens")


def check_chat(body: ChatBody) -> None:
    check_depth(body.messages, "messages")
    check_conversation(body)


def check_batch(body: BatchBody, max_conversations: int) -> None:
    if body.stream:
        raise InvalidRequest.wrong("stream", "false, because batches cannot be streamed", True)
    if len(body.messages) > max_conversations:
        raise InvalidRequest.at(
            "messages",
            f"{len(body.messages):,} conversations exceed this server's limit of "
            f"{max_conversations:,} per batch",
        )
    for place, messages in enumerate(body.messages):
        check_depth(messages, f"messages[{place}]")
    check_conversation(body)


def check_conversation(body: ChatBody | BatchBody) -> None:
    _check_common(body)
    for field in _NESTED:
        check_depth(getattr(body, field), field)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest.at("top_logprobs", "requires logprobs to be true")
    if body.modalities not in (None, ["text"]):
        raise unsupported("modalities", "the only supported value is ['text']")
    for field, instead in _REPLACED.items():
        if getattr(body, field):
            raise unsupported(field, instead)
    _check_members(body.reasoning, "reasoning", _REASONING_MEMBERS)
    _check_members(body.thinking, "thinking", _THINKING_MEMBERS)


def _check_members(value: Any, field: str, known: Sequence[str]) -> None:
    if isinstance(value, Mapping):
        for name, member in value.items():
            if name not in known and member is not None:
                raise unsupported(f"{field}.{name}", f"supported members: {', '.join(known)}")


def check_completion(body: CompletionBody) -> None:
    _check_common(body)
    if body.suffix and body.echo:
        raise InvalidRequest.at("echo", "not available with suffix")
    is_open_ended = isinstance(body, OpenEndedCompletion)
    if body.max_tokens == 0 and not body.echo and not is_open_ended:
        raise InvalidRequest.at("max_tokens", "0 requires echo to be true")


def _check_common(body: ChatBody | BatchBody | CompletionBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest.at("stream_options", "requires stream to be true")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest.at("prompt_logprobs", "not available with stream")
    if body.logprob_token_ids and body.num_logprobs is None:
        raise InvalidRequest.at("logprob_token_ids", "requires logprobs")
    if body.best_of not in (None, body.n or 1):
        raise unsupported("best_of", "the only supported value is that of n")
    for field, instead in _REFUSED.items():
        if getattr(body, field):
            raise unsupported(field, instead)
    for field in FORM_FIELDS:
        check_depth(getattr(body, field), field)
