"""The handle: a sealed text that names a prompt's K/V in another engine.

The text is URL-safe base64, without padding, of three parts: version (1 byte), tag (32 bytes) and
encrypted body. The plain body is a `Handle` as MessagePack. The tag is the HMAC-SHA256 of the
version and the plain body. The body is encrypted with a SHAKE-256 key stream that is derived from
the tag. This is authenticated encryption with the tag as nonce: equal handles have equal texts, and
different handles never share a key stream. Without the cluster's key, a handle can be neither
created nor read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

import msgspec

from engine_core.requests.kv_handle import Handle
from protocol.wire.errors import InvalidRequest
from protocol.worker.kv import KV_FIELD

VERSION = 1
MAX_CHARS = 4096
TAG_BYTES = 32


class Seal:
    """Converts handles to sealed texts and back. `secret` is derived from the cluster's key."""

    def __init__(self, secret: bytes) -> None:
        self._tag_key = hmac.digest(secret, b"tidegate kv handle: tag", hashlib.sha256)
        self._stream_key = hmac.digest(secret, b"tidegate kv handle: hide", hashlib.sha256)

    def to_text(self, handle: Handle) -> str:
        """Return the handle as sealed text."""
        body = msgspec.msgpack.encode(handle)
        tag = self._tag(body)
        sealed = bytes([VERSION]) + tag + self._xor_key_stream(body, tag)
        return base64.urlsafe_b64encode(sealed).rstrip(b"=").decode()

    def from_text(self, text: str) -> Handle:
        """Return the handle in a sealed text.

        Raises InvalidRequest unless an engine with the same cluster key has written the text.
        """
        if len(text) > MAX_CHARS:
            raise _refusal(
                f"not a handle: {len(text):,} characters; a handle has at most {MAX_CHARS:,}"
            )
        try:
            sealed = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise _refusal("not a handle") from None
        if len(sealed) <= 1 + TAG_BYTES:
            raise _refusal("not a handle")
        if sealed[0] != VERSION:
            raise _refusal(
                f"the handle has version {sealed[0]}; this engine reads version {VERSION}"
            )
        tag = sealed[1 : 1 + TAG_BYTES]
        body = self._xor_key_stream(sealed[1 + TAG_BYTES :], tag)
        if not hmac.compare_digest(tag, self._tag(body)):
            raise _refusal(
                "the handle was not written by an engine of this cluster, or was modified"
            )
        try:
            return msgspec.msgpack.decode(body, type=Handle)
        except msgspec.MsgspecError as error:
            raise _refusal(f"the handle was written by another release: {error}") from None

    def _tag(self, body: bytes) -> bytes:
        return hmac.digest(self._tag_key, bytes([VERSION]) + body, hashlib.sha256)

    def _xor_key_stream(self, body: bytes, tag: bytes) -> bytes:
        """Encrypt or decrypt `body`: return it XORed with the key stream of `tag`."""
        stream = hashlib.shake_256(self._stream_key + tag).digest(len(body))
        return bytes(a ^ b for a, b in zip(body, stream, strict=True))


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param=KV_FIELD)
