"""Keys of the HTTP API: the file they are kept in, what each may do, and how one is known again.

The file is TOML, one table per key, for people to read and change:

    [keys.alice]
    digest = "a3f1..."               # of the key; the key itself is nowhere
    scopes = ["inference"]
    requests_per_minute = 60

A digest is a plain SHA-256 and not bcrypt, scrypt or the like. Slow hashes protect what people
choose, which can be guessed; our keys are 256 random bits, which cannot, however fast the hash. And
a slow hash per request would let anybody who has no key keep the server busy with wrong ones.
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
"""Scanners for leaked secrets know a key by it."""
SECRET_BYTES = 32
MAX_KEY_LETTERS = 512
MAX_FILE_BYTES = 8 << 20
MAX_KEYS = 10_000
UNSAFE_MODE = 0o022
"""Who may write into the file may let himself in."""

_DOMAIN = b"tidegate api key 1\0"
_WORD = r"^[A-Za-z0-9_-]{1,64}$"
_KEY = re.compile(rf"[!-~]{{1,{MAX_KEY_LETTERS}}}")

Name = Annotated[str, Meta(pattern=_WORD)]


class KeyEntry(Config, frozen=True, kw_only=True, omit_defaults=True):
    """What one key may do. Numbers: 0 is no limit of this key's own."""

    digest: Annotated[str, about("of the key", wiring=True, pattern=r"^[0-9a-f]{64}$")]
    scopes: Annotated[
        list[Scope], about("what it opens; repeat for several. Default: inference", min_length=1)
    ] = msgspec.field(default_factory=lambda: ["inference"])
    requests_per_minute: Annotated[int, about("requests it may make", ge=0, le=1 << 30)] = 0
    tokens_per_minute: Annotated[
        int, about("tokens of prompts and answers it may use", ge=0, le=1 << 40)
    ] = 0
    concurrency: Annotated[int, about("answers (n counts) that are made at once", ge=0)] = 0
    max_n: Annotated[int, about("most choices (n) in one request", ge=0)] = 0
    max_len: Annotated[int, about("most tokens of prompt and answer together", ge=0)] = 0
    priority: Annotated[
        int, about("how far it may go before others: the least `priority` it may ask for", le=0)
    ] = 0
    namespace: Annotated[
        str,
        about(
            "keys of one namespace share cached prompts, and can measure each other's by the time "
            "that answers take; default: a key shares with nobody",
            pattern=r"^[A-Za-z0-9_-]{0,64}$",
        ),
    ] = ""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: dict[Name, KeyEntry] = {}


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def check_name(name: str) -> None:
    """Raises ValueError for what can be no key's name."""
    if not re.fullmatch(_WORD, name):
        raise ValueError(f"{name!r}: a name is 1 to 64 letters, digits, - and _")


def check_key(key: str) -> None:
    """Raises ValueError, without the key, for what no header can carry."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"a key is 1 to {MAX_KEY_LETTERS} printable ASCII letters without spaces")


def digest_of(key: str) -> str:
    """64 hex digits. The domain keeps it apart from digests of the same text made elsewhere."""
    return hashlib.sha256(_DOMAIN + key.encode()).hexdigest()


def parse(text: str) -> dict[str, KeyEntry]:
    """Keys by name. Raises ValueError, in one line, that says where it is wrong."""
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
    """What the file holds. Raises ValueError where it cannot be read, or others may write it."""
    try:
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(info.st_mode) or info.st_mode & UNSAFE_MODE:
        raise ValueError(f"{path}: others may write into it (chmod go-w {path})")
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{path}: more than {MAX_FILE_BYTES:,} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path}: this is no text") from None


def read(path: str) -> dict[str, KeyEntry]:
    """Keys by name. Raises ValueError, in one line."""
    text = read_text(path)
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
