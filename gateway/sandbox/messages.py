"""Calls to a sandbox process, its replies, and their frames on the socket to the gateway.

One call is open at a time. The reply to a call does not depend on earlier calls. So if a process
was killed, its call can be sent again to a new process. (Earlier calls only fill the cache of
compiled templates.)

A frame is the length of a JSON text and the length of raw bytes, in four bytes each, followed by
both. The raw bytes are images and their tensors. The text is not MessagePack, because a request may
contain integers that are too large for MessagePack. If the highest bit of the first length is set,
the frame is the last reply of its process.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import msgspec

from gateway.images.settings import ProcessorSettings
from gateway.prompt.thinking import ThinkingProfile
from gateway.prompt.traits import TemplateTraits
from gateway.prompt.written import WrittenTurns
from protocol.engine.attachments import ITEM_BYTES, TensorType

Buffer = bytes | bytearray | memoryview
HEAD_BYTES = 8
LAST = 1 << 31
"""The bit of a frame's first length that marks the last reply of a process."""
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


class LoadProcessor(msgspec.Struct, frozen=True, tag="load_processor", array_like=True):
    """Gateway -> process. Load an image processor."""

    settings: ProcessorSettings


class ProcessImage(msgspec.Struct, frozen=True, tag="image", array_like=True):
    """Gateway -> process. Decode and preprocess an image: the raw bytes of the frame."""

    settings: ProcessorSettings


Call = LoadTemplate | ProbeTemplate | RenderTemplate | TryTokenizer | LoadProcessor | ProcessImage


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


class ProcessorLoaded(msgspec.Struct, frozen=True, tag="processor", array_like=True):
    """Process -> gateway. The image processor is loaded."""


class TensorHead(msgspec.Struct, frozen=True, array_like=True):
    """An `AttachedTensor` without its data."""

    name: str
    dtype: TensorType
    shape: list[int]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class ImageProcessed(msgspec.Struct, frozen=True, tag="tensors", array_like=True):
    """Process -> gateway. The tensors of an image. The raw bytes of the frame are their data, one
    after the other. The other fields are those of `Preprocessed`."""

    tensors: list[TensorHead]
    #: `attachment_digest` of the tensors.
    digest: str
    numbers: dict[str, list[int]]
    shapes: dict[str, list[int]]
    decode_s: float
    preprocess_s: float


class CallFailed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """Process -> gateway. The template, the tokenizer or the image processor raised an error."""

    message: str


class OutOfMemory(msgspec.Struct, frozen=True, tag="memory", array_like=True):
    """Process -> gateway. The call needs more memory than the process has left.

    This is the last reply of the process: it then ends, because earlier calls may have used up the
    memory. Unless this was its first call, the gateway repeats the call in a new process.
    """


Reply = (
    TemplateLoaded
    | TemplateProbed
    | TemplateRendered
    | TokenizerWorks
    | ProcessorLoaded
    | ImageProcessed
    | CallFailed
    | OutOfMemory
)

encode = msgspec.json.Encoder().encode
decode_call = msgspec.json.Decoder(Call).decode
decode_reply = msgspec.json.Decoder(Reply).decode


def to_frame(message: Call | Reply, raw: Sequence[Buffer] = ()) -> bytes:
    """Return the frame of a message, with the buffers in `raw` as its raw bytes.

    Raises ValueError if the frame is too long, or if a string contains half of a surrogate pair.
    """
    body = encode(message)
    sizes = len(body), sum(memoryview(each).nbytes for each in raw)
    if sum(sizes) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {sum(sizes):,} bytes is too long")
    return b"".join([*(size.to_bytes(HEAD_BYTES // 2, "big") for size in sizes), body, *raw])


def sizes_of(head: Buffer) -> tuple[int, int, bool]:
    """Return the lengths in the head of a frame, and whether it is the last reply."""
    first, second = (
        int.from_bytes(memoryview(head)[place : place + HEAD_BYTES // 2], "big")
        for place in (0, HEAD_BYTES // 2)
    )
    return first & ~LAST, second, bool(first & LAST)


def marked_last(frame: bytes) -> bytes:
    """Return the frame of a reply, marked as the last reply of its process."""
    return bytes([frame[0] | LAST >> 24]) + frame[1:]
