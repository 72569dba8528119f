"""Finds the libraries that a GPU needs, by their files and metadata. Nothing is imported."""

from __future__ import annotations

import re
import shutil
from importlib import metadata
from pathlib import Path

from worker.attention.flash_library import installed_folders

FLASH_FILE = re.compile(r"_vllm_fa(\d)_C.*\.so")


def version_of(package: str) -> str:
    """Return the version of an installed package; "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def c_compiler() -> str:
    """Return the path of a C compiler, which Triton needs at its first launch; "" if there is
    none."""
    return next(filter(None, map(shutil.which, ("gcc", "clang"))), "")


def attention_libraries(fetched: Path) -> list[str]:
    """Return the FlashAttention libraries that a worker would find, such as
    "FlashAttention 3 (/opt/libraries)".

    fetched   directory of `tidegate fetch-kernels`
    """
    return [
        f"FlashAttention {number} ({folder})"
        for folder in (fetched, *installed_folders())
        for number in _versions(folder)
    ]


def _versions(folder: Path) -> list[str]:
    """Return the versions of FlashAttention whose libraries are in a folder, newest first."""
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    return sorted((hit[1] for hit in map(FLASH_FILE.fullmatch, names) if hit), reverse=True)
