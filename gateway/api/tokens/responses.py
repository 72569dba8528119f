"""Response bodies of the tokenize routes, for the OpenAPI document and for tests."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.openai.responses import Effective


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """token_strs  each token as the vocabulary spells it ("Ġworld"); null unless requested"""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    effective: Effective | UnsetType = UNSET


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """input_tokens  number of prompt tokens of the chat request"""

    object: Literal["chat.completion.input_tokens"]
    input_tokens: int


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str
