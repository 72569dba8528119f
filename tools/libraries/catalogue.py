"""The libraries that `tidegate fetch-kernels` fetches.

They are files of the package vLLM, from the Python index. The package itself is not installed. The
worker finds a library by the name of its file (worker/attention/flash_library.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.models.wheel_file import WheelFile

MACHINE = "x86_64"
"""The processors for which the libraries are built, as `platform.machine` names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryEntry(WheelFile):
    """A library of attention kernels for GPUs."""

    #: One line for the help.
    description: str


def _of_vllm(name: str, description: str, member: str, size: int, sha256: str) -> LibraryEntry:
    return LibraryEntry(
        name=name,
        description=description,
        licence="BSD-3-Clause AND Apache-2.0",  # FlashAttention, and vLLM, which builds it
        package="vllm",
        version="0.33.0",
        wheel_bytes=336_361_138,
        wheel_sha256="4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa",
        member=f"vllm/vllm_flash_attn/{member}",
        file_bytes=size,
        file_sha256=sha256,
    )


LIBRARIES = {
    entry.name: entry
    for entry in (
        _of_vllm(
            "fa3",
            "FlashAttention 3, for H100 and H200 (compute capability 9.x)",
            "_vllm_fa3_C.abi3.so",
            172_594_888,
            "bcea1246912ed71467b008749057c798877fbf6fcee63eb056c5cc4b0beace17",
        ),
        _of_vllm(
            "fa2",
            "FlashAttention 2, for compute capability 8.0 and later (A100, RTX 30 to 50, B200)",
            "_vllm_fa2_C.abi3.so",
            307_960_648,
            "826f6015512b7517c98a60c5507df9c9aba4270da128fa39fb2aaab2ba948037",
        ),
    )
}
"""The libraries by the names that users give."""
DEFAULT_LIBRARY = "fa3"


def library_folder(home: Path) -> Path:
    """Return the directory of the libraries in Tidegate's directory of downloads."""
    return home / "libraries"
