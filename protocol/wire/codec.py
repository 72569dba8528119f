"""Encodes messages as ZeroMQ frames and decodes them: MessagePack, with extra frames for arrays.

Frame 0 is a version byte, followed by the MessagePack map of the message. An `Array` in the map is
an extension value: `Ext(1, header + bytes)` if it is small, or `Ext(2, header + frame number)` if
its bytes are in a frame of their own. The header is the dtype code and the number of dimensions
(one byte each), then each dimension (uint32, little-endian).

The decoder checks sizes and counts before it allocates memory. For a malformed message it raises
only WireError. Messages contain data only: there is no pickle, and nothing received is executed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from protocol.wire.arrays import CODES, KINDS, MAX_DIMS, Array
from protocol.wire.errors import WireError

WIRE_VERSION = 1
INLINE_BYTES = 4096
"""An array of up to this size is encoded in frame 0."""
MAX_MESSAGE_BYTES = 256 << 20
MAX_FRAMES = 1024
"""An `Outputs` may have an array for each request that a step has encoded: MAX_STEP_INPUTS."""

_INLINE, _FRAME = 1, 2
_VERSION = bytes([WIRE_VERSION])
_UINT32 = struct.Struct("<I")

Frames = list[Any]
"""The frames of one message, each bytes or a memoryview, for `Socket.send_multipart`."""
T = TypeVar("T")


def encode(message: msgspec.Struct) -> Frames:
    """Return the frames of `message`. The buffers of large arrays are not copied."""
    frames: Frames = [b""]

    def hook(value: Any) -> msgspec.msgpack.Ext:
        if not isinstance(value, Array):
            raise TypeError(f"{type(value).__name__} cannot be sent")
        dims = b"".join(map(_UINT32.pack, value.shape))
        header = bytes((CODES[type(value)], len(value.shape))) + dims
        if value.data.nbytes <= INLINE_BYTES:
            return msgspec.msgpack.Ext(_INLINE, header + value.data)
        frames.append(value.data)
        return msgspec.msgpack.Ext(_FRAME, header + _UINT32.pack(len(frames) - 1))

    frames[0] = _VERSION + msgspec.msgpack.encode(message, enc_hook=hook)
    return frames


class Decoder(Generic[T]):
    """Decodes the messages of one direction, such as `ToClient`.

    kind   union of the message classes of that direction

    Only one thread may use a decoder, because it stores the frames of the message that is being
    decoded.
    """

    def __init__(self, kind: Any) -> None:
        self._frames: Sequence[Any] = ()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
            kind, dec_hook=_as_declared, ext_hook=self._read_array
        )

    def decode(self, frames: Sequence[Any]) -> T:
        """Return the message in `frames`. Raises WireError if it is malformed, too large, of
        another wire version, or of a kind that this decoder does not accept."""
        if not 1 <= len(frames) <= MAX_FRAMES:
            raise WireError(f"a message of {len(frames)} frames")
        size = sum(memoryview(frame).nbytes for frame in frames)
        if size > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {size:,} bytes; the limit is {MAX_MESSAGE_BYTES:,}")
        head = memoryview(frames[0])
        if head[:1] != _VERSION:
            got = head[0] if len(head) else "nothing"
            raise WireError(f"wire version {got}; expected {WIRE_VERSION}")
        self._frames = frames
        try:
            return self._decoder.decode(head[1:])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WireError(str(error)) from None
        finally:
            self._frames = ()

    def _read_array(self, code: int, data: memoryview) -> Array:
        if code not in (_INLINE, _FRAME):
            raise ValueError(f"unknown extension type {code}")
        kind, shape, rest = _read_header(data)
        if code == _FRAME:
            if len(rest) != _UINT32.size:
                raise ValueError("malformed frame number")
            (number,) = _UINT32.unpack(rest)
            if not 1 <= number < len(self._frames):
                raise ValueError(f"frame {number} of {len(self._frames)}")
            return kind(self._frames[number], shape)
        # `rest` keeps all of frame 0 alive. A copy of the small array allows freeing the frame.
        return kind(bytes(rest), shape)


def _read_header(data: memoryview) -> tuple[type[Array], tuple[int, ...], memoryview]:
    if len(data) < 2 or data[0] not in KINDS or data[1] > MAX_DIMS:
        raise ValueError("malformed array header")
    end = 2 + 4 * data[1]
    if len(data) < end:
        raise ValueError("malformed array header")
    return KINDS[data[0]], struct.unpack_from(f"<{data[1]}I", data, 2), data[end:]


def _as_declared(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value
