"""Calls to a limited process and its replies: frames on a socket that only the two ends have.

A call is complete in itself: the process keeps nothing that a call needs but for speed, so a killed
process is replaced by a new one and the call is sent again. One call is open at a time.

A frame is its length in four bytes, then JSON. It is not MessagePack because a request may hold
integers of any size, which MessagePack has no room for. The highest bit of the length marks the
last reply of a process.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.prompt.template import TemplateTraits
from gateway.prompt.thinking import ThinkingProfile

LENGTH_BYTES = 4
LAST = 1 << 31
MAX_FRAME_BYTES = 256 << 20
"""The largest body a server takes, escaped; and the largest prompt."""


class LoadTemplate(msgspec.Struct, frozen=True, tag="load", array_like=True):
    source: str
    special_tokens: dict[str, str]


class RenderTemplate(msgspec.Struct, frozen=True, tag="render", array_like=True):
    """variables  of this rendering; see `template_variables`"""

    source: str
    special_tokens: dict[str, str]
    variables: dict[str, Any]


class TryTokenizer(msgspec.Struct, frozen=True, tag="try_tokenizer", array_like=True):
    """tokenizer  a tokenizer.json"""

    tokenizer: str


Call = LoadTemplate | RenderTemplate | TryTokenizer


class TemplateLoaded(msgspec.Struct, frozen=True, tag="loaded", array_like=True):
    habits: TemplateTraits
    profile: ThinkingProfile


class TemplateRendered(msgspec.Struct, frozen=True, tag="rendered", array_like=True):
    text: str


class TokenizerWorks(msgspec.Struct, frozen=True, tag="works", array_like=True):
    """All that was tried was done."""


class CallFailed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The foreign code refused, or failed by itself."""

    message: str


class OutOfMemory(msgspec.Struct, frozen=True, tag="memory", array_like=True):
    """The call needs more than the process may have. Always its last reply."""


Reply = TemplateLoaded | TemplateRendered | TokenizerWorks | CallFailed | OutOfMemory

encode = msgspec.json.Encoder().encode
decode_call = msgspec.json.Decoder(Call).decode
decode_reply = msgspec.json.Decoder(Reply).decode


def to_frame(message: Call | Reply) -> bytes:
    """Raises ValueError if the message holds text that is no Unicode, or is too long."""
    body = encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body):,} bytes is too long")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def marked_last(frame: bytes) -> bytes:
    return bytes([frame[0] | LAST >> 24]) + frame[1:]
