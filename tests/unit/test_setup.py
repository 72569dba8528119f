"""setup.py does not compile a library again that is newer than its sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = f"worker/kernels/_generic{sysconfig.get_config_var('EXT_SUFFIX')}"
SOURCES = ("setup.py", "worker/kernels/sets.py", "worker/kernels/csrc/simd.h")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what setup.py reads, and a library newer than that."""
    shutil.copytree(ROOT / "worker/kernels/csrc", tmp_path / "worker/kernels/csrc")
    for name in ("setup.py", "setup.cfg", "README.md", "worker/kernels/sets.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / LIBRARY).write_bytes(b"compiled before")
    for file in tmp_path.rglob("*"):
        os.utime(file, (1_000, 1_000))
    os.utime(tmp_path / LIBRARY, (2_000, 2_000))
    return tmp_path


def build(checkout: Path) -> Path:
    """Build with a compiler that always fails. Return the file of the library."""
    subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", "out", "--build-temp", "temp"],
        cwd=checkout,
        env={**os.environ, "CC": "false", "CXX": "false"},
        check=True,
        capture_output=True,
        timeout=100,
    )
    return checkout / "out" / LIBRARY


def test_a_library_newer_than_its_sources_is_copied(checkout: Path) -> None:
    assert build(checkout).read_bytes() == b"compiled before"


@pytest.mark.parametrize("source", SOURCES)
def test_a_library_older_than_a_source_is_compiled(checkout: Path, source: str) -> None:
    os.utime(checkout / source, (3_000, 3_000))
    assert not build(checkout).exists()
