"""Paths that users write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from protocol.config.base import NO_PATH
from protocol.process.exit_codes import ExitCode
from tools.failure import Failure
from tools.flags import Flag

NAMES_OF_MODELS = ("model", "draft_model")
"""Options whose values are paths of models, or names that are no paths."""
NAMED_PATHS = "lora"
"""The option whose values are NAME=PATH."""


def user_path(text: str | Path) -> Path:
    """Return a path in which `~` or `~NAME` at the start is that user's home directory. Raises
    Failure if it is not known."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        message = f"{text}: the home directory is not known; write the whole path"
        raise Failure(message, exit_code=ExitCode.USAGE) from None


def in_folder(flag: Flag, value: Any, folder: Path) -> Any:
    """Return the value of an option with its paths absolute. Relative ones start at `folder`."""
    if flag.is_list or flag.is_tuple:
        return [_named_path(item, folder) for item in value] if flag.field == NAMED_PATHS else value
    if flag.is_path:
        return _path(value, folder)
    return local_model(value, folder) if flag.field in NAMES_OF_MODELS else value


def _path(text: str, folder: Path) -> str:
    if text in ("", NO_PATH):
        return text
    return os.path.abspath(folder / user_path(text))


def _named_path(text: str, folder: Path) -> str:
    """Return NAME=PATH with an absolute path. The config refuses a text without a path."""
    name, equals, path = text.partition("=")
    return f"{name}{equals}{_path(path, folder)}"


def local_model(model: str, folder: Path) -> str:
    """Return the path of a model in `folder`, or `model` itself if there is no such path. `model`
    may be NAME=MODEL."""
    name, equals, path = model.rpartition("=")
    local = folder / user_path(path)
    return f"{name}{equals}{local}" if path and local.exists() else model
