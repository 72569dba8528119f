"""LoRA adapters: the checks of their names and paths.

An adapter has a name, by which requests select it, and a digest of its content. The engine assigns
it a row of the worker's table, and increases the row's generation each time it does so. The digest
is part of the hashes of cached blocks, so an adapter that was changed and loaded again under the
same name never uses blocks of the former one.
"""

from __future__ import annotations

import re

import msgspec

from protocol.wire.errors import InvalidRequest

MAX_NAME_CHARS = 128
MAX_PATH_CHARS = 4096
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./@+-]*")


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that can be used."""

    name: str
    #: Hex digest of the content.
    digest: str
    #: The largest rank of its modules.
    rank: int
    #: Path of its directory, as the operator gave it.
    path: str


def check_adapter_name(name: str, param: str = "lora_name") -> None:
    """Raise InvalidRequest unless `name` can be the name of an adapter."""
    if len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name):
        raise InvalidRequest.at(
            param,
            f"an adapter's name has 1 to {MAX_NAME_CHARS} letters, digits and _./@+-, and starts "
            "with a letter, a digit or _",
        )


def check_adapter_path(path: str, param: str = "lora_path") -> None:
    """Raise InvalidRequest unless `path` can be a path."""
    if not path or len(path) > MAX_PATH_CHARS or "\0" in path:
        raise InvalidRequest.at(param, f"a path has 1 to {MAX_PATH_CHARS:,} characters")


def split_adapter(text: str) -> tuple[str, str]:
    """Return (name, path) of an adapter that is given as "name=path". Raises ValueError."""
    name, equals, path = text.partition("=")
    if not equals:
        raise ValueError(f"lora {text!r:.200} must be NAME=PATH")
    try:
        check_adapter_name(name, "lora")
        check_adapter_path(path, "lora")
    except InvalidRequest as error:
        raise ValueError(f"lora {text!r:.200} must be NAME=PATH: {error.message}") from None
    return name, path
