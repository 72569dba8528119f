"""How GGUF files begin, and how those of a split model are named: "model-00001-of-00003.gguf" is
the first part."""

from __future__ import annotations

import re
from pathlib import Path, PurePath

MAGIC = b"GGUF"
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")


def _found(path: str) -> re.Match[str] | None:
    """Return the match of a path that is named like a part; None if it is not, or if the number is
    not that of a part."""
    found = _PART.fullmatch(path)
    return found if found is not None and 1 <= int(found[2]) <= int(found[3]) else None


def has_magic(path: Path) -> bool:
    """Return whether a file begins as a GGUF file does, whatever its name is. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def part_of(path: str) -> tuple[int, int] | None:
    """Return the number of a part, from 1, and the number of parts; None if the file at `path` is
    not named like a part."""
    found = _found(path)
    return None if found is None else (int(found[2]), int(found[3]))


def all_parts(path: str) -> list[str]:
    """Return the paths of all parts of the model at `path`, in order: `path` alone if it is not
    named like a part."""
    found = _found(path)
    if found is None:
        return [path]
    return [f"{found[1]}-{part:05}-of-{found[3]}.gguf" for part in range(1, int(found[3]) + 1)]


def is_later_part(path: str) -> bool:
    """Return whether a file is named like a part that is not the first one."""
    part = part_of(path)
    return part is not None and part[0] != 1


def model_name(path: PurePath) -> str:
    """Return the name of a file's model: the file's, without the number of a part."""
    found = _found(path.name)
    return path.stem if found is None else found[1]
