"""Request bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.api.openai.requests import ChatBody
from protocol.sampling import TokenId

MAX_TOKENS = 1 << 20


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """return_token_strs  include each token as the vocabulary spells it"""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(ChatBody, frozen=True, kw_only=True):
    """A chat request. Fields that concern only the answer have no effect."""

    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
    model: str | None = None


tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
tokenize_chat_decoder = msgspec.json.Decoder(TokenizeChatBody)
detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)
