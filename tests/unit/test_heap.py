"""Memory that was needed temporarily is returned to the system, and a worker gets huge pages."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.process.malloc import huge_page_environment, return_free_memory

PIECES, PIECE_BYTES = 512, 100_000
"""Pieces of this size are in the heap. Larger ones would be mapped, and unmapped when freed."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_free_pages_below_one_that_is_not_free_go_back_to_the_system() -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("needs glibc")
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    pieces = [libc.malloc(PIECE_BYTES) for _ in range(PIECES)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE_BYTES)
    stays = libc.malloc(PIECE_BYTES)
    for piece in pieces:
        libc.free(piece)
    before = resident_bytes()
    return_free_memory()
    assert resident_bytes() < before - PIECES * PIECE_BYTES // 2
    libc.free(stays)


# ---- huge pages
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Which memory gets huge pages; the choice is in brackets."""
LEAST_GLIBC = (2, 35)
WRITES_PIECE = f"""
import ctypes, mmap, sys
if sys.argv[1] == "asks itself":
    piece = mmap.mmap(-1, {64 << 20}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    piece.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
else:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    address = libc.malloc({64 << 20})
ctypes.memset(address, 1, {64 << 20})
print(open("/proc/self/smaps_rollup").read())
"""


def huge_bytes(way: str, variables: dict[str, str]) -> int:
    """Return the memory in huge pages of a process that writes to 64 MiB."""
    plain = {name: os.environ[name] for name in os.environ if name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", WRITES_PIECE, way]
    text = subprocess.check_output(command, env=plain | variables, text=True)
    (kib,) = re.findall(r"AnonHugePages: +(\d+) kB", text)
    return int(kib) << 10


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
        ({"GLIBC_TUNABLES": ""}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.perturb=7"},
            {"GLIBC_TUNABLES": "glibc.malloc.perturb=7:glibc.malloc.hugetlb=1"},
        ),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, {}),
    ],
)
def test_a_tunable_of_the_user_is_kept(given: dict[str, str], expected: dict[str, str]) -> None:
    assert huge_page_environment(given) == expected


def test_a_process_with_the_variable_has_huge_pages() -> None:
    library, version = platform.libc_ver()
    if not THP.exists() or "[madvise]" not in THP.read_text():
        pytest.skip("needs a system that gives huge pages to programs that ask for them")
    if library != "glibc" or tuple(map(int, version.split("."))) < LEAST_GLIBC:
        pytest.skip("needs glibc 2.35")
    if huge_bytes("asks itself", {}) < 32 << 20:
        pytest.skip("the system has too few huge pages free")
    assert huge_bytes("malloc", huge_page_environment({})) >= 32 << 20
    assert huge_bytes("malloc", {}) < 32 << 20
