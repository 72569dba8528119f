"""Request bodies of the render and derender routes. Names and shapes are vLLM's.

A render route accepts the body of its API's route, plus the fields of `Carried`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from gateway.api.openai.requests import ChatBody, CompletionBody, Object
from gateway.api.tokens.responses import GenerateChunk, GenerateResponse
from gateway.http.text_fields import Name
from protocol.engine.sampling import MAX_TOKENS, TokenId

MAX_STATE_CHARS = 1 << 18
"""Maximum length of a `stream_state`."""

Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Ids = Annotated[list[TokenId], Meta(min_length=1)]
State = Annotated[str, Meta(max_length=MAX_STATE_CHARS)]


class Carried(msgspec.Struct, frozen=True):
    """Fields that a render route copies into the rendered request unchanged."""

    kv_transfer_params: Object | None = None


class DerenderBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both derender routes.

    stream           whether to derender one chunk instead of a complete response. Default: false
    generate_chunk   a chunk of the token endpoint; send the chunks one at a time, in order
    stream_state     the value that the previous call returned; null with the first chunk
    """

    described_like: ClassVar = ChatBody

    stream: bool | None = None
    model: Name | None = None
    generate_chunk: GenerateChunk | None = None
    stream_state: State | None = None


class DerenderChat(DerenderBody, frozen=True, kw_only=True):
    """Tokens that answer a rendered chat, to turn into the answer of that chat.

    chat_request       the request that was rendered; required if the model has a tool format or a
                       reasoning format. If null, all text is content, and logprobs are included
                       if the token endpoint sent them
    generate_response  the complete response of the token endpoint
    prompt_token_ids   the prompt. If it is null, the first chunk or the response may have it, else
                       `chat_request` is rendered again
    prompt_tokens      number of prompt tokens
    """

    chat_request: ChatBody | None = None
    generate_response: GenerateResponse | None = None
    prompt_tokens: Count | None = None
    prompt_token_ids: Ids | None = None


class DerenderCompletion(DerenderBody, frozen=True, kw_only=True):
    """Tokens that continue rendered prompts, to turn into the answer of that request. Lists have
    one item per prompt.

    completion_request  the request that was rendered. If null, there is one prompt per response,
                        and logprobs are included if the token endpoint sent them
    generate_responses  the complete responses of the token endpoint
    prompt_tokens       number of tokens of each prompt
    prompt_token_ids    the prompts. If an item is null, the response for this prompt may have it
    prompt_index        the prompt that the chunk belongs to; each prompt has its own stream and
                        stream_state
    """

    completion_request: CompletionBody | None = None
    generate_responses: list[GenerateResponse] | None = None
    prompt_tokens: list[Count] | None = None
    prompt_token_ids: list[Ids | None] | None = None
    prompt_index: Count = 0
