"""Finds the libraries that a GPU needs, by their files and metadata. Nothing is imported."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata, util
from pathlib import Path

FLASH_ATTENTION = (("vllm_flash_attn", ""), ("vllm", "vllm_flash_attn"))
"""Packages that contain FlashAttention libraries, each with the directory inside the package."""
FLASH_FILE = re.compile(r"_vllm_fa(\d)_C.*\.so")


def version_of(package: str) -> str:
    """Return the version of an installed package; "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def attention_libraries() -> list[str]:
    """Return the installed FlashAttention libraries, such as "FlashAttention 3 (vllm 0.33.0)"."""
    found = []
    for package, inside in FLASH_ATTENTION:
        name = f"{package} {version_of(package)}".strip()
        for number in _versions_in(folder / inside for folder in _folders(package)):
            found.append(f"FlashAttention {number} ({name})")
    return found


def _versions_in(folders: Iterable[Path]) -> list[str]:
    """Return the versions of FlashAttention whose libraries are in the folders, newest first."""
    names = [file.name for folder in folders if folder.is_dir() for file in folder.iterdir()]
    return sorted((hit[1] for hit in map(FLASH_FILE.fullmatch, names) if hit), reverse=True)


def _folders(package: str) -> list[Path]:
    spec = util.find_spec(package)
    return [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
