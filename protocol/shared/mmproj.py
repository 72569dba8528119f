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
ENCODED_KINDS = frozenset(
    {"gemma3", "idefics3", "pixtral", "qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger"}
)
"""`clip.projector_type` of the encoders that can be used."""
KIND_KEYS = ("clip.vision.projector_type", "clip.projector_type")
"""Keys of the kind of encoder. Files with encoders of images and of sound have the first one."""
START_BYTES = 1 << 16
"""The first bytes of a file have its kind: the converter writes it before all longer settings."""
PREFERRED = ("F16", "BF16", "Q8_0", "F32")
"""Number types in the names of the files, the best one first. Encoders are computed in float32."""

_TEXT = 8
"""GGUF's number for a text."""
_TYPE = re.compile(rf"[-_.]?{NUMBER_TYPE.pattern}", re.IGNORECASE)


def is_mmproj(name: str) -> bool:
    """Return whether a file is named like one."""
    return "mmproj" in name.lower() and name.endswith(".gguf")


def has_usable_encoder(architecture: str | None) -> bool:
    """Return whether a repository of GGUF files may have an encoder that can be used.

    architecture   that of its files; None: not known. The Hub reports that of one file, which may
                   be the encoder itself: "clip"
    """
    return architecture in (None, "clip") or architecture in ENCODED_ARCHITECTURES


def unusable_kind(start: bytes) -> str | None:
    """Return the kind of an encoder that cannot be used; None if it can, or if it is not known.

    start   the first START_BYTES of its file
    """
    kind = next(filter(None, (text_in(start, key) for key in KIND_KEYS)), None)
    return None if kind in ENCODED_KINDS else kind


def text_in(start: bytes, key: str) -> str | None:
    """Return a text of a GGUF file's metadata, from the first bytes of the file; None if they do
    not contain it."""
    name = len(key).to_bytes(8, "little") + key.encode() + _TEXT.to_bytes(4, "little")
    _, _, rest = start.partition(name)
    size = int.from_bytes(rest[:8], "little")
    text = rest[8 : 8 + size]
    return text.decode(errors="replace") if 0 < size == len(text) else None


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
