"""setup.py compiles the libraries that are needed, and each instruction set can be compiled."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from worker.device.cpuinfo import cpu_flags
from worker.kernels.instruction_sets import INSTRUCTION_SETS

ROOT = Path(__file__).parents[2]
LIBRARY = f"worker/kernels/_generic{sysconfig.get_config_var('EXT_SUFFIX')}"
IS_X86 = platform.machine() in ("x86_64", "AMD64")
SETS_AND_FLAGS = ("worker/kernels/instruction_sets.py", "worker/device/cpuinfo.py")
SOURCES = ("setup.py", "worker/kernels/instruction_sets.py", "worker/kernels/csrc/simd.h")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder with the files that setup.py reads, and a library newer than all of them."""
    shutil.copytree(ROOT / "worker/kernels/csrc", tmp_path / "worker/kernels/csrc")
    (tmp_path / "worker/device").mkdir()
    for name in ("setup.py", "setup.cfg", "README.md", *SETS_AND_FLAGS):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / LIBRARY).write_bytes(b"compiled before")
    for file in tmp_path.rglob("*"):
        os.utime(file, (1_000, 1_000))
    os.utime(tmp_path / LIBRARY, (2_000, 2_000))
    return tmp_path


def build(checkout: Path, *options: str) -> str:
    """Build into the folder `out` with a compiler that always fails. Return what is printed."""
    folders = ("--build-lib", "out", "--build-temp", "temp")
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", *folders, *options],
        cwd=checkout,
        env={**os.environ, "CC": "false", "CXX": "false"},
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    return done.stdout


def test_a_library_newer_than_its_sources_is_copied(checkout: Path) -> None:
    build(checkout)
    assert (checkout / "out" / LIBRARY).read_bytes() == b"compiled before"


@pytest.mark.parametrize("source", SOURCES)
def test_a_library_older_than_a_source_is_compiled(checkout: Path, source: str) -> None:
    os.utime(checkout / source, (3_000, 3_000))
    build(checkout)
    assert not (checkout / "out" / LIBRARY).exists()


def test_a_build_in_place_has_only_the_sets_of_this_processor(checkout: Path) -> None:
    names = {each.name for each in INSTRUCTION_SETS if each.needs <= cpu_flags()}
    assert tried(build(checkout, "--inplace", "--force")) == names
    if IS_X86:
        assert tried(build(checkout, "--force")) == {each.name for each in INSTRUCTION_SETS}


def tried(printed: str) -> set[str]:
    """Return the instruction sets that setup.py tried to compile."""
    return set(re.findall(r"building 'worker\.kernels\._(\w+)' extension", printed))


@pytest.mark.skipif(not IS_X86, reason="the instruction sets are those of x86")
@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")
@pytest.mark.parametrize("name", [each.name for each in INSTRUCTION_SETS])
def test_the_compiler_accepts_each_instruction_set(name: str) -> None:
    """This includes the sets that a build in place skips because this processor cannot run them."""
    (options,) = (each.options for each in INSTRUCTION_SETS if each.name == name)
    source = str(ROOT / "worker/kernels/csrc/kernels.cpp")
    command = ["c++", "-std=c++17", "-fsyntax-only", "-w", *options, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr
