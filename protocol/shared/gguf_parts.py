"""How the files of a split GGUF model are named: "model-00001-of-00003.gguf" is its first part."""

from __future__ import annotations

import re
from pathlib import PurePath

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def part_of(path: str) -> tuple[int, int] | None:
    """Return the number of a part, from 1, and the number of parts; None if the file at `path` is
    not named like a part."""
    found = _PART.fullmatch(path)
    return (int(found[2]), int(found[3])) if found else None


def all_parts(path: str) -> list[str]:
    """Return the paths of all parts of the model at `path`, in order: `path` alone if it is not
    named like a part."""
    found = _PART.fullmatch(path)
    if found is None:
        return [path]
    count = int(found[3])
    return [f"{found[1]}-{part:05}-of-{found[3]}.gguf" for part in range(1, count + 1)]


def is_later_part(path: str) -> bool:
    """Return whether a file is named like a part that is not the first one."""
    part = part_of(path)
    return part is not None and part[0] != 1


def model_name(path: PurePath) -> str:
    """Return the name of a file's model: the file's, without the number of a part."""
    found = _PART.fullmatch(path.name)
    return found[1] if found else path.stem
