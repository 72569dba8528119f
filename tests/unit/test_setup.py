"""setup.py compiles the libraries that are needed, and each instruction set can be compiled."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

from worker.device.cpuinfo import cpu_flags
from worker.kernels.instruction_sets import INSTRUCTION_SETS, sets_of

ROOT = Path(__file__).parents[2]
LIBRARY = f"worker/kernels/_generic{sysconfig.get_config_var('EXT_SUFFIX')}"
OWN_SETS = sets_of(platform.machine())
SETS_AND_FLAGS = ("worker/kernels/instruction_sets.py", "worker/device/cpuinfo.py")
SOURCES = ("setup.py", "worker/kernels/instruction_sets.py", "worker/kernels/csrc/simd.h")


WATCHED_BUILD = """
import fcntl, os, runpy, sys
import setuptools  # whose distutils is imported next
from distutils import file_util

copy = file_util._copy_file_contents

def watched(infile, outfile, *options):
    with open("setup.py") as other:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            state = "locked"
        else:
            state = "unlocked"
    # A single write: other extensions are built in threads, which print as well.
    found = "over a file" if os.path.exists(outfile) else "a new file"
    sys.stdout.write(f"copy: {state}, {found}\\n")
    copy(infile, outfile, *options)

file_util._copy_file_contents = watched
runpy.run_path("setup.py", run_name="__main__")
"""
"""Runs setup.py. Prints, for each file that is copied, whether another build could start now, and
whether the copy overwrites a file."""


FAILS_AT_O3 = """#!/bin/sh
for option in "$@"; do
    case $option in
    -O*) level=$option ;;
    -c) compiles=yes ;; # the other call links
    esac
    test "$last" = -o && out=$option
    last=$option
done
test "$compiles" = yes && test "$level" = -O3 && exit 1
echo made > "$out"
"""


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


def build(
    checkout: Path,
    *options: str,
    program: Sequence[str] = ("setup.py",),
    compiler: str = "false",
) -> str:
    """Build into the folder `out` with a compiler that, by default, always fails. Return what is
    printed."""
    folders = ("--build-lib", "out", "--build-temp", "temp")
    done = subprocess.run(
        [sys.executable, *program, "build_ext", *folders, *options],
        cwd=checkout,
        env={**os.environ, "CC": compiler, "CXX": compiler},
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


def test_no_other_build_and_no_worker_sees_a_part_of_a_library(checkout: Path) -> None:
    """A second build once took a half-copied library for a whole one, and workers that loaded it
    were killed by SIGBUS."""
    (checkout / "watched.py").write_text(WATCHED_BUILD)
    with (checkout / LIBRARY).open("rb") as loaded:
        printed = build(checkout, "--inplace", program=["watched.py"])
        copies = re.findall(r"copy: (.*)", printed)
        assert copies == ["locked, a new file"] * 2, printed  # to the folder `out`, and back
        assert (checkout / LIBRARY).read_bytes() == b"compiled before"
        assert not os.path.samestat(os.fstat(loaded.fileno()), (checkout / LIBRARY).stat())


@pytest.mark.parametrize("source", SOURCES)
def test_a_library_older_than_a_source_is_compiled(checkout: Path, source: str) -> None:
    os.utime(checkout / source, (3_000, 3_000))
    build(checkout)
    assert not (checkout / "out" / LIBRARY).exists()


def test_a_build_in_place_has_only_the_sets_of_this_processor(checkout: Path) -> None:
    names = {each.name for each in INSTRUCTION_SETS if each.needs <= cpu_flags()}
    assert tried(build(checkout, "--inplace", "--force")) == names
    assert tried(build(checkout, "--force")) == {each.name for each in OWN_SETS}


def test_a_compiler_that_fails_at_o3_compiles_the_generic_set_at_o2(checkout: Path) -> None:
    """g++ 12 for ARM once had an internal error at -O3, and there were no kernels at all."""
    compiler = checkout / "compiler"
    compiler.write_text(FAILS_AT_O3)
    compiler.chmod(0o755)
    printed = build(checkout, "--force", compiler=str(compiler))
    assert (checkout / "out" / LIBRARY).read_text() == "made\n"
    assert "compiling worker.kernels._generic again with -O2" in printed
    assert [path.name for path in (checkout / "out").rglob("_*.so")] == [Path(LIBRARY).name]


def test_an_architecture_has_its_own_sets_and_the_generic_one() -> None:
    """Names are those of Linux, Windows and macOS."""
    assert [each.name for each in sets_of("aarch64")] == ["i8mm", "neon", "generic"]
    assert sets_of("arm64") == sets_of("aarch64")
    assert sets_of("AMD64") == sets_of("x86_64")
    assert [each.name for each in sets_of("riscv64")] == ["generic"]
    of_all = {each for machine in ("x86_64", "aarch64") for each in sets_of(machine)}
    assert of_all == set(INSTRUCTION_SETS)


def tried(printed: str) -> set[str]:
    """Return the instruction sets that setup.py tried to compile."""
    return set(re.findall(r"building 'worker\.kernels\._(\w+)' extension", printed))


@pytest.mark.parametrize("name", [each.name for each in INSTRUCTION_SETS])
def test_a_compiler_accepts_each_instruction_set(name: str) -> None:
    """This includes the sets that a build in place skips because this processor cannot run them,
    and those of ARM if there is a cross compiler."""
    (each,) = (each for each in INSTRUCTION_SETS if each.name == name)
    compiler = "c++" if each in OWN_SETS else f"{each.machine}-linux-gnu-g++"
    if not shutil.which(compiler):
        pytest.skip(f"there is no {compiler}")
    source = str(ROOT / "worker/kernels/csrc/kernels.cpp")
    command = [compiler, "-std=c++17", "-fsyntax-only", "-w", *each.options, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr
