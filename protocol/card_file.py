"""A model card in a file, for a gateway without an engine.

Written by the worker's room, which reads model files; read by a gateway.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from protocol.model_card import ModelCard


class CardFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file. max_len: most tokens of prompt and answer together."""

    card: ModelCard
    max_len: int


def write(path: str | Path, content: CardFile) -> None:
    Path(path).write_bytes(msgspec.msgpack.encode(content))


def read(path: str | Path) -> CardFile:
    """Read a card file. Raises ValueError if it is missing or malformed."""
    try:
        return msgspec.msgpack.decode(Path(path).read_bytes(), type=CardFile)
    except OSError as error:
        raise ValueError(f"cannot read the card {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a model card: {error}") from None
