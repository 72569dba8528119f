"""The key that the processes of one cluster share: its file, and what is derived from it.

Whoever holds the key may ask engines to compute, and may write handles that they trust; nobody
else gets an answer over a network. From it follow, each with a label of its own, the two CURVE key
pairs of every connection (sockets.py) and whatever other secrets the cluster needs (`derive`): one
file is all that has to be carried to another host.

The file holds at least MIN_BYTES random bytes, as they are or in URL-safe base64, and nobody but
its owner may use it: mode 0600 or less.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
import stat

import msgspec
import zmq
from zmq.utils import z85

MIN_BYTES = 32
MAX_FILE_BYTES = 4096
SAFE_MODE = 0o600

_TEXT = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


class KeyPair(msgspec.Struct, frozen=True):
    """Of CURVE, in Z85, as ZeroMQ takes them."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public.decode()})"


class ClusterKey:
    """server   of every socket that binds
    client   of every socket that connects: nobody else is admitted
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) < MIN_BYTES:
            raise ValueError(f"a cluster key of {len(secret)} bytes; it needs {MIN_BYTES}")
        self._secret = secret
        self.server = _pair(self.derive("curve server"))
        self.client = _pair(self.derive("curve client"))

    def derive(self, purpose: str) -> bytes:
        """[32] A secret for this purpose alone: who knows it knows neither the key nor another."""
        return hmac.digest(self._secret, f"tidegate 1: {purpose}".encode(), hashlib.sha256)


def read_cluster_key(path: str) -> ClusterKey | None:
    """The key in this file; None for no path. Raises ValueError, in one line, where the file cannot
    be read, others could read it too, or what it holds is too short."""
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cluster key {path}: {error.strerror}") from None
    if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o777 & ~SAFE_MODE:
        raise ValueError(
            f"cluster key {path}: others may use this file; it needs mode 0600 (chmod 600 {path})"
        )
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"cluster key {path}: this is no key: more than {MAX_FILE_BYTES} bytes")
    try:
        return ClusterKey(_bytes_of(content))
    except ValueError as error:
        raise ValueError(f"cluster key {path}: {error}; `tidegate key FILE` makes one") from None


def write_cluster_key(path: str) -> None:
    """A new key into a new file. Raises FileExistsError rather than lose an old one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, SAFE_MODE)
    with open(descriptor, "wb") as file:
        file.write(base64.urlsafe_b64encode(secrets.token_bytes(MIN_BYTES)) + b"\n")


def _bytes_of(content: bytes) -> bytes:
    """What is written in the letters of base64 is base64, so hex digits do not pass for bytes."""
    text = content.strip().rstrip(b"=")
    if not text or not _TEXT.issuperset(text):
        return content
    try:
        return base64.urlsafe_b64decode(text + b"=" * (-len(text) % 4))
    except binascii.Error:
        raise ValueError("what it holds is no base64") from None


def _pair(secret: bytes) -> KeyPair:
    """ZeroMQ clamps the secret as Curve25519 wants it, wherever it uses it."""
    encoded = z85.encode(secret)
    return KeyPair(zmq.curve_public(encoded), encoded)
