"""The files in which llama.cpp's converter stores the image encoder of a GGUF model."""

from __future__ import annotations

import re
from collections.abc import Iterable

ENCODED_ARCHITECTURES = frozenset(
    {"gemma3", "llama", "mistral3", "qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"}
)
"""`general.architecture` of the models whose encoders can be used."""
PREFERRED = ("F16", "BF16", "Q8_0", "F32")
"""Number types in the names of the files, the best one first. Encoders are computed in float32."""

_TYPE = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(PREFERRED)})(?![A-Za-z0-9_])", re.IGNORECASE)


def is_mmproj(name: str) -> bool:
    """Return whether a file is named like one."""
    return "mmproj" in name.lower() and name.endswith(".gguf")


def best_mmproj(names: Iterable[str]) -> str | None:
    """Return the file to use of those in the folder of a model: the best one if their names differ
    only in the number type. Return None if there is none, or if they differ in more."""
    found = sorted(name for name in names if is_mmproj(name))
    if len({_TYPE.sub("", name) for name in found}) != 1:
        return None
    return min(found, key=_rank)


def _rank(name: str) -> int:
    kind = _TYPE.search(name)
    return len(PREFERRED) if kind is None else PREFERRED.index(kind[0].upper())
