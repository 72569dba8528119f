"""The handle: a sealed envelope that stands for a prompt's K/V in another engine.

text = URL-safe base64, without padding, of: version (1 byte), tag (32), sealed body. The body is
the Handle as MessagePack. The tag is the HMAC-SHA256 of version and body; the body is hidden by a
stream of SHAKE-256 that the tag begins (authenticated encryption with the tag as its nonce: equal
handles have equal texts, different ones never the same stream). Who lacks the cluster's key can
neither write one nor read an address out of it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

import msgspec

from protocol.errors import InvalidRequest
from protocol.kv import KV_FIELD

VERSION = 1
MAX_CHARS = 4096
TAG_BYTES = 32


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """What one engine tells another.

    lease       under which name the K/V is kept, by that life (`epoch`) of the engine
    address     where its worker is asked
    num_tokens  how many tokens' K/V there is, from position 0 on
    layout      digest of the K/V's shape and kind (KVEndpoint); told: the same for people
    content     hash of these tokens, with model and namespace (hash.py)
    """

    lease: bytes
    epoch: str
    address: str
    num_tokens: int
    layout: bytes
    told: str
    content: bytes


class Seal:
    """Closes and opens handles. `secret`: what the cluster's key gives for this purpose."""

    def __init__(self, secret: bytes) -> None:
        self._tag_key = hmac.digest(secret, b"tidegate kv handle: tag", hashlib.sha256)
        self._hide_key = hmac.digest(secret, b"tidegate kv handle: hide", hashlib.sha256)

    def close(self, handle: Handle) -> str:
        body = msgspec.msgpack.encode(handle)
        tag = self._tag(body)
        sealed = bytes([VERSION]) + tag + self._hide(body, tag)
        return base64.urlsafe_b64encode(sealed).rstrip(b"=").decode()

    def open(self, text: str) -> Handle:
        """Raises InvalidRequest unless an engine of this cluster closed it."""
        if len(text) > MAX_CHARS:
            raise _refusal(f"{len(text):,} characters are no handle; one has {MAX_CHARS:,} at most")
        try:
            sealed = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise _refusal("this is no handle") from None
        if len(sealed) <= 1 + TAG_BYTES:
            raise _refusal("this is no handle")
        if sealed[0] != VERSION:
            raise _refusal(f"a handle of version {sealed[0]}; this engine reads {VERSION}")
        tag = sealed[1 : 1 + TAG_BYTES]
        body = self._hide(sealed[1 + TAG_BYTES :], tag)
        if not hmac.compare_digest(tag, self._tag(body)):
            raise _refusal(
                "the handle was not written by an engine of this cluster, or was changed"
            )
        try:
            return msgspec.msgpack.decode(body, type=Handle)
        except msgspec.MsgspecError as error:
            raise _refusal(f"the handle is of another release: {error}") from None

    def _tag(self, body: bytes) -> bytes:
        return hmac.digest(self._tag_key, bytes([VERSION]) + body, hashlib.sha256)

    def _hide(self, body: bytes, tag: bytes) -> bytes:
        """Hidden becomes plain, plain becomes hidden."""
        stream = hashlib.shake_256(self._hide_key + tag).digest(len(body))
        return bytes(a ^ b for a, b in zip(body, stream, strict=True))


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param=KV_FIELD)
