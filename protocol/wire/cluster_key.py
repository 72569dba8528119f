"""The cluster key: the secret that all processes of one cluster share.

A process with the key can send requests to engines over a network, and can write K/V handles that
engines accept. A process without it gets no answer over a network. The two CURVE key pairs of every
connection (sockets.py) and all other secrets of the cluster are derived from the key, each with its
own label (`derive`). So only one file has to be copied to another host.

The file holds at least MIN_BYTES random bytes, raw or in URL-safe base64. Its mode must be 0600 or
stricter.
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
    """A CURVE key pair. Both keys are encoded in Z85, as ZeroMQ expects them."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public.decode()})"


class ClusterKey:
    """The cluster key, and the CURVE key pairs derived from it. The constructor raises ValueError
    if the secret has fewer than MIN_BYTES bytes.

    server   key pair of every socket that binds
    client   key pair of every socket that connects; no other peer is admitted
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) < MIN_BYTES:
            raise ValueError(f"the key has {len(secret)} bytes; it needs {MIN_BYTES}")
        self._secret = secret
        self.server = _pair(self.derive("curve server"))
        self.client = _pair(self.derive("curve client"))

    def derive(self, purpose: str) -> bytes:
        """Return a secret of 32 bytes for `purpose`. The secret reveals neither the cluster key nor
        the secrets for other purposes."""
        return hmac.digest(self._secret, f"tidegate 1: {purpose}".encode(), hashlib.sha256)


def read_cluster_key(path: str) -> ClusterKey | None:
    """Return the key in the file at `path`; None if `path` is "". Raises ValueError, with a message
    of one line, if the file cannot be read or is not a safe key file."""
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cluster key {path}: {error.strerror}") from None
    if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o777 & ~SAFE_MODE:
        raise ValueError(f"cluster key {path}: its mode must be 0600 (chmod 600 {path})")
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"cluster key {path}: not a key: more than {MAX_FILE_BYTES} bytes")
    try:
        return ClusterKey(_decode_key(content))
    except ValueError as error:
        raise ValueError(
            f"cluster key {path}: {error}; `tidegate cluster-key FILE` makes one"
        ) from None


def write_cluster_key(path: str) -> None:
    """Write a new key to a new file. Raises FileExistsError instead of overwriting a key."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, SAFE_MODE)
    with open(descriptor, "wb") as file:
        file.write(base64.urlsafe_b64encode(secrets.token_bytes(MIN_BYTES)) + b"\n")


def _decode_key(content: bytes) -> bytes:
    """Return the bytes of the key in a key file's `content`. Content in the alphabet of URL-safe
    base64 is decoded, even if it was meant as hex digits. Any other content is the key itself."""
    text = content.strip().rstrip(b"=")
    if not text or not _TEXT.issuperset(text):
        return content
    try:
        return base64.urlsafe_b64decode(text + b"=" * (-len(text) % 4))
    except binascii.Error:
        raise ValueError("the content is not valid base64") from None


def _pair(secret: bytes) -> KeyPair:
    """Return the CURVE key pair of `secret`, 32 bytes, which libzmq clamps for Curve25519."""
    encoded = z85.encode(secret)
    return KeyPair(zmq.curve_public(encoded), encoded)
