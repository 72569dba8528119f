"""What the render and derender routes tell, as structs."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.openai.requests import StreamOptions
from gateway.api.openai.responses import ChatChunk, CompletionChunk
from gateway.api.tokens.generate_requests import ReasoningParserKwargs
from protocol.grammar import Grammar


class RenderedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A body for POST /inference/v1/generate.

    sampling_params   complete; without max_tokens where the request says none: as much as the
                      context of whoever generates leaves
    reasoning_ended   an answer of one form begins with that form, not with thinking
    reads_calls       tool calls are looked for in the answer
    grammar           what the answer must look like: structured outputs, demanded calls, a budget
    """

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str
    reasoning_ended: bool | None = None
    reads_calls: bool | None = None
    reasoning_parser_kwargs: ReasoningParserKwargs | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    grammar: Grammar | None = None
    kv_transfer_params: dict[str, Any] | None = None


class DerenderedChatPart(ChatChunk, frozen=True, kw_only=True):
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class DerenderedCompletionPart(CompletionChunk, frozen=True, kw_only=True):
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class DerenderedChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """chunk         null: nothing can be told yet
    stream_state  for the next call; nothing in it is meant for anyone else"""

    chunk: DerenderedChatPart | None
    stream_state: str


class DerenderedCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """See DerenderedChatChunk."""

    chunk: DerenderedCompletionPart | None
    stream_state: str
