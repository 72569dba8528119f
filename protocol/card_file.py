"""A model's card in a file: what a gateway without an engine knows of its model.

Written by the worker's room, which reads model files; read by a gateway.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from protocol.model_card import ModelCard


class CardFile(msgspec.Struct, frozen=True, kw_only=True):
    """max_len  tokens of prompt and answer together, as whoever generates allows them"""

    card: ModelCard
    max_len: int


def write(path: str | Path, content: CardFile) -> None:
    Path(path).write_bytes(msgspec.msgpack.encode(content))


def read(path: str | Path) -> CardFile:
    """Raises ValueError where the file is missing or is no such file."""
    try:
        return msgspec.msgpack.decode(Path(path).read_bytes(), type=CardFile)
    except OSError as error:
        raise ValueError(f"cannot read the card {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} holds no model card: {error}") from None
