"""The render and derender routes: what may be asked. Names and shapes are vLLM's.

A render route takes the body of its API's own route, and with it `Carried`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.api.openai.requests import ChatBody, CompletionBody, Object
from gateway.api.tokens.generate_responses import GenerateChunk, GenerateResponse
from protocol.sampling import MAX_TOKENS, TokenId

MAX_STATE_CHARS = 1 << 18

Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Ids = Annotated[list[TokenId], Meta(min_length=1)]
State = Annotated[str, Meta(max_length=MAX_STATE_CHARS)]


class Carried(msgspec.Struct, frozen=True):
    """What a rendered request carries on as it came, though no chat here has such a field."""

    kv_transfer_params: Object | None = None


class DerenderBody(msgspec.Struct, frozen=True, kw_only=True):
    """What both derender routes understand.

    stream         a chunk is given, not a whole answer
    generate_chunk   what the token endpoint streamed; one at a time, in their order
    stream_state   what the call before this one answered; null with the first chunk
    """

    stream: bool | None = None
    model: str | None = None
    generate_chunk: GenerateChunk | None = None
    stream_state: State | None = None


class DerenderChat(DerenderBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions/derender.

    chat_request       the request that was rendered; null: the text is content, and logprobs are
                       told where there are any. Needed for a model whose answers have parts
    generate_response  the whole answer of the token endpoint
    prompt_token_ids   the prompt; without it, as where a first chunk or a whole answer does not
                       bring it, `chat_request` is rendered again
    prompt_tokens      how many these are
    """

    chat_request: ChatBody | None = None
    generate_response: GenerateResponse | None = None
    prompt_tokens: Count | None = None
    prompt_token_ids: Ids | None = None


class DerenderCompletion(DerenderBody, frozen=True, kw_only=True):
    """POST /v1/completions/derender. Lists have one item for each prompt of the request.

    completion_request  the request that was rendered; null: there are as many prompts as responses,
                        and logprobs are told where there are any
    prompt_token_ids    of a prompt null: those of its response
    prompt_index        which prompt the chunk goes on with; each has a stream and a state of its
                        own
    """

    completion_request: CompletionBody | None = None
    generate_responses: list[GenerateResponse] | None = None
    prompt_tokens: list[Count] | None = None
    prompt_token_ids: list[Ids | None] | None = None
    prompt_index: Count = 0


carried_decoder = msgspec.json.Decoder(Carried)
derender_chat_decoder = msgspec.json.Decoder(DerenderChat)
derender_completion_decoder = msgspec.json.Decoder(DerenderCompletion)
