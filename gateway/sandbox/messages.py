"""Calls to a sandbox process, its replies, and their frames on the socket to the gateway.

One call is open at a time. The reply to a call does not depend on earlier calls. So if a process
was killed, its call can be sent again to a new process. (Earlier calls only fill the cache of
compiled templates.)

A frame is the length of a JSON text, in four bytes, followed by the text. It is not MessagePack,
because a request may contain integers that are too large for MessagePack. If the highest bit of the
length is set, the frame is the last reply of its process.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.prompt.thinking import ThinkingProfile
from gateway.prompt.traits import TemplateTraits
from gateway.prompt.written import WrittenTurns

LENGTH_BYTES = 4
LAST = 1 << 31
"""The bit of a frame's length that marks the last reply of a process."""
MAX_FRAME_BYTES = 256 << 20
"""Enough for the largest body that a server accepts, escaped, and for the largest prompt."""


class LoadTemplate(msgspec.Struct, frozen=True, tag="load", array_like=True):
    """Gateway -> process. Compile a chat template and find its traits."""

    source: str
    special_tokens: dict[str, str]


class ProbeTemplate(msgspec.Struct, frozen=True, tag="probe", array_like=True):
    """Gateway -> process. Find what a chat template writes for calls and reasoning."""

    source: str
    special_tokens: dict[str, str]


class RenderTemplate(msgspec.Struct, frozen=True, tag="render", array_like=True):
    """Gateway -> process. Render a chat template."""

    source: str
    special_tokens: dict[str, str]
    #: All variables of the template except the special tokens.
    variables: dict[str, Any]


class TryTokenizer(msgspec.Struct, frozen=True, tag="try_tokenizer", array_like=True):
    """Gateway -> process. Load a tokenizer, and encode and decode texts with it."""

    #: The text of a tokenizer.json.
    tokenizer: str


Call = LoadTemplate | ProbeTemplate | RenderTemplate | TryTokenizer


class TemplateLoaded(msgspec.Struct, frozen=True, tag="loaded", array_like=True):
    """Process -> gateway. The template compiles."""

    traits: TemplateTraits
    profile: ThinkingProfile


class TemplateProbed(msgspec.Struct, frozen=True, tag="probed", array_like=True):
    """Process -> gateway. What the template writes for tool calls and reasoning."""

    written: WrittenTurns


class TemplateRendered(msgspec.Struct, frozen=True, tag="rendered", array_like=True):
    """Process -> gateway. The output of the template."""

    text: str


class TokenizerWorks(msgspec.Struct, frozen=True, tag="works", array_like=True):
    """Process -> gateway. The tokenizer has passed its trial."""


class CallFailed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """Process -> gateway. The template or the tokenizer raised an error."""

    message: str


class OutOfMemory(msgspec.Struct, frozen=True, tag="memory", array_like=True):
    """Process -> gateway. The call needs more memory than the process has left.

    This is the last reply of the process: it then ends, because earlier calls may have used up the
    memory. Unless this was its first call, the gateway repeats the call in a new process.
    """


Reply = (
    TemplateLoaded | TemplateProbed | TemplateRendered | TokenizerWorks | CallFailed | OutOfMemory
)

encode = msgspec.json.Encoder().encode
decode_call = msgspec.json.Decoder(Call).decode
decode_reply = msgspec.json.Decoder(Reply).decode


def to_frame(message: Call | Reply) -> bytes:
    """Return the frame of a message.

    Raises ValueError if the frame is too long, or if a string contains half of a surrogate pair.
    """
    body = encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body):,} bytes is too long")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def marked_last(frame: bytes) -> bytes:
    """Return the frame of a reply, marked as the last reply of its process."""
    return bytes([frame[0] | LAST >> 24]) + frame[1:]
