"""The files in which llama.cpp's converter stores the image encoder of a GGUF model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from protocol.shared.number_types import NUMBER_TYPE

ENCODED_ARCHITECTURES = frozenset(
    {"gemma3", "llama", "mistral3", "qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"}
)
"""`general.architecture` of the models whose encoders can be used."""
PREFERRED = ("F16", "BF16", "Q8_0", "F32")
"""Number types in the names of the files, the best one first. Encoders are computed in float32."""

_TYPE = re.compile(rf"[-_.]?{NUMBER_TYPE.pattern}", re.IGNORECASE)


def is_mmproj(name: str) -> bool:
    """Return whether a file is named like one."""
    return "mmproj" in name.lower() and name.endswith(".gguf")


def best_mmproj(names: Iterable[str]) -> str | None:
    """Return the file to use of those in the folder of a model: the best one if their names differ
    only in the number type. Return None if there is none, or if they differ in more."""
    found = sorted((name for name in names if is_mmproj(name)), reverse=True)
    if len({_TYPE.sub("", name) for name in found}) != 1:
        return None
    return min(found, key=_rank)  # of other types the last by name, which has the most bits


def mmproj_files(model: Path) -> list[Path]:
    """Return the files named like one in the folder of a GGUF file. In a repository of the Hub's
    cache, they may be in a folder above instead: quantisations often have folders of their own."""
    root = next(filter(_is_snapshot, model.parents), model.parent)
    for folder in model.parents:
        try:
            found = [each for each in folder.iterdir() if is_mmproj(each.name) and each != model]
        except OSError:  # a folder may be readable only by name
            found = []
        if found or folder == root:
            return found
    return []


def _is_snapshot(folder: Path) -> bool:
    """Return whether a folder of the Hub's cache has the files of a commit."""
    return folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--")


def _rank(name: str) -> int:
    kinds = NUMBER_TYPE.findall(name)
    kind = kinds[-1].upper().replace("FP", "F") if kinds else ""
    return PREFERRED.index(kind) if kind in PREFERRED else len(PREFERRED)
