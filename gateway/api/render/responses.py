"""Response bodies of the render and derender routes."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.openai.requests import StreamOptions
from gateway.api.openai.responses import ChatChunk, CompletionChunk
from gateway.api.tokens.requests import ReasoningParserKwargs
from protocol.engine.grammar import Grammar


class RenderedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A body for POST /inference/v1/generate.

    sampling_params   all parameters; max_tokens is absent if the request does not limit the answer
    reasoning_ended   true: no reasoning precedes a structured answer; false: reasoning may precede
    reads_calls       whether to parse tool calls in the answer
    grammar           the constraint on the answer: structured outputs, required calls, budget
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
    """A chunk of a chat completion, made from one chunk of token ids.

    kv_transfer_params  copied from the chunk of POST /inference/v1/generate
    """

    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class DerenderedCompletionPart(CompletionChunk, frozen=True, kw_only=True):
    """A chunk of a text completion, made from one chunk of token ids.

    kv_transfer_params  copied from the chunk of POST /inference/v1/generate
    """

    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class DerenderedChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request that derenders one chunk of a chat: a chunk of the chat completion.

    chunk         null if there is nothing to send yet
    stream_state  opaque value; send it with the next chunk
    """

    chunk: DerenderedChatPart | None
    stream_state: str


class DerenderedCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request that derenders one chunk of a text completion.

    chunk         null if there is nothing to send yet
    stream_state  opaque value; send it with the next chunk
    """

    chunk: DerenderedCompletionPart | None
    stream_state: str
