"""Keys of the HTTP API: the file that stores them, their permissions, and how a key is checked.

The file is TOML, one table per key, for people to read and edit:

    [keys.alice]
    digest = "a3f1..."               # of the key; the key itself is not stored
    scopes = ["inference"]
    requests_per_minute = 60

A digest is a SHA-256, not a slow hash such as bcrypt or scrypt. Slow hashes protect passwords,
because passwords can be guessed. Our keys cannot be guessed: they are 256 random bits. A slow hash
per request would also let anyone without a key keep the server busy by sending wrong keys.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.config.base import Config, about

Scope = Literal["inference", "admin", "metrics"]
ALL_SCOPES: frozenset[Scope] = frozenset(("inference", "admin", "metrics"))

PREFIX = "tg-"
"""Prefix of every new key. Scanners for leaked secrets recognise our keys by it."""
SECRET_BYTES = 32
MAX_KEY_LETTERS = 512
MAX_FILE_BYTES = 8 << 20
MAX_KEYS = 10_000
UNSAFE_MODE = 0o022
"""Mode bits that the keys file must not have: they let other users write to it and so add a key."""

_DOMAIN = b"tidegate api key 1\0"
_WORD = r"^[A-Za-z0-9_-]{1,64}$"
_KEY = re.compile(rf"[!-~]{{1,{MAX_KEY_LETTERS}}}")

Name = Annotated[str, Meta(pattern=_WORD)]


class KeyEntry(Config, frozen=True, kw_only=True, omit_defaults=True):
    """The permissions and limits of one key. A limit of 0 means that the key has no such limit."""

    digest: Annotated[
        str, about("SHA-256 digest of the key", wiring=True, pattern=r"^[0-9a-f]{64}$")
    ]
    scopes: Annotated[
        list[Scope],
        about("permission of the key; repeat for several; default: inference", min_length=1),
    ] = msgspec.field(default_factory=lambda: ["inference"])
    requests_per_minute: Annotated[
        int, about("most requests per minute; 0: no limit", ge=0, le=1 << 30)
    ] = 0
    tokens_per_minute: Annotated[
        int, about("most tokens of prompts and answers per minute; 0: no limit", ge=0, le=1 << 40)
    ] = 0
    concurrency: Annotated[
        int, about("most answers generated at once, counting each of n; 0: no limit", ge=0)
    ] = 0
    max_n: Annotated[int, about("most choices (n) in one request; 0: no limit", ge=0)] = 0
    max_len: Annotated[
        int, about("most tokens of prompt and answer together; 0: no limit", ge=0)
    ] = 0
    priority: Annotated[
        int, about("lowest `priority` value that requests may set; lower values go first", le=0)
    ] = 0
    namespace: Annotated[
        str,
        about(
            "keys with the same namespace share cached prompts, so each can find out by timing "
            "what others have sent; default: shared with no other key",
            metavar="NAMESPACE",
            pattern=r"^[A-Za-z0-9_-]{0,64}$",
        ),
    ] = ""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: dict[Name, KeyEntry] = {}


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def check_name(name: str) -> None:
    """Raise ValueError if `name` cannot be the name of a key."""
    if not re.fullmatch(_WORD, name):
        raise ValueError(f"{name!r}: a name is 1 to 64 letters, digits, - and _")


def check_key(key: str) -> None:
    """Raise ValueError if `key` is too long or cannot be sent in an HTTP header. The message does
    not contain the key."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"a key is 1 to {MAX_KEY_LETTERS} printable ASCII letters without spaces")


def digest_of(key: str) -> str:
    """Return the digest of a key that the keys file stores: 64 hex digits. A fixed prefix is hashed
    with the key, so the digest differs from a plain SHA-256 of the key."""
    return hashlib.sha256(_DOMAIN + key.encode()).hexdigest()


def parse(text: str) -> dict[str, KeyEntry]:
    """Return the keys in the text of a keys file, by name. Raises ValueError with a message of one
    line."""
    try:
        keys = msgspec.toml.decode(text, type=_File).keys
    except msgspec.DecodeError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if len(keys) > MAX_KEYS:
        raise ValueError(f"{len(keys):,} keys; at most {MAX_KEYS:,}")
    names: dict[str, str] = {}
    for name, entry in keys.items():
        if (other := names.setdefault(entry.digest, name)) != name:
            raise ValueError(f"{other} and {name} are the same key")
    return keys


def read_text(path: str) -> str:
    """Return the text of a keys file. Raises ValueError if the file cannot be read, is too large,
    is not text, or can be written by other users."""
    try:
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(info.st_mode) or info.st_mode & UNSAFE_MODE:
        raise ValueError(f"{path}: other users can write to it (chmod go-w {path})")
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{path}: more than {MAX_FILE_BYTES:,} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file") from None


def read(path: str) -> dict[str, KeyEntry]:
    """Return the keys in the keys file at `path`, by name. Raises ValueError with a message of one
    line."""
    text = read_text(path)
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
