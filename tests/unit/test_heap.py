"""Memory that was needed temporarily is returned to the system."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from protocol.process.malloc import return_free_memory

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
