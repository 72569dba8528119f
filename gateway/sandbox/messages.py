"""Calls to a sandbox process and its replies: frames on a socket between it and the gateway.

A call does not depend on earlier calls, except for speed. So if a process was killed, the call is
sent again to a new one. One call is open at a time.

A frame is its length in four bytes, then JSON. MessagePack cannot express the integers of any size
that a request may contain. The highest bit of the length marks the last reply of a process.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.prompt.template import TemplateTraits
from gateway.prompt.thinking import ThinkingProfile

LENGTH_BYTES = 4
LAST = 1 << 31
MAX_FRAME_BYTES = 256 << 20
"""Enough for the largest body that a server accepts, escaped, and for the largest prompt."""


class LoadTemplate(msgspec.Struct, frozen=True, tag="load", array_like=True):
    source: str
    special_tokens: dict[str, str]


class RenderTemplate(msgspec.Struct, frozen=True, tag="render", array_like=True):
    """variables  the variables of this rendering; see `template_variables`"""

    source: str
    special_tokens: dict[str, str]
    variables: dict[str, Any]


class TryTokenizer(msgspec.Struct, frozen=True, tag="try_tokenizer", array_like=True):
    """tokenizer  the text of a tokenizer.json"""

    tokenizer: str


Call = LoadTemplate | RenderTemplate | TryTokenizer


class TemplateLoaded(msgspec.Struct, frozen=True, tag="loaded", array_like=True):
    habits: TemplateTraits
    profile: ThinkingProfile


class TemplateRendered(msgspec.Struct, frozen=True, tag="rendered", array_like=True):
    text: str


class TokenizerWorks(msgspec.Struct, frozen=True, tag="works", array_like=True):
    """The tokenizer passed its trial."""


class CallFailed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The foreign code raised an error."""

    message: str


class OutOfMemory(msgspec.Struct, frozen=True, tag="memory", array_like=True):
    """The call needs more memory than the process may use. It is the last reply of the process."""


Reply = TemplateLoaded | TemplateRendered | TokenizerWorks | CallFailed | OutOfMemory

encode = msgspec.json.Encoder().encode
decode_call = msgspec.json.Decoder(Call).decode
decode_reply = msgspec.json.Decoder(Reply).decode


def to_frame(message: Call | Reply) -> bytes:
    """Return the frame of a message. Raise ValueError if it is too long or has lone surrogates."""
    body = encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body):,} bytes is too long")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def marked_last(frame: bytes) -> bytes:
    """Return a reply's frame, marked as the last one of its process."""
    return bytes([frame[0] | LAST >> 24]) + frame[1:]
