"""What a step has freed is there for the next one, in a process of its own: it cannot be undone."""

from __future__ import annotations

import subprocess
import sys

import pytest

STEPS, PIECES, PIECE_BYTES, PAGE_BYTES = 8, 3, 12 << 20, 4096
PROGRAM = f"""
import ctypes, resource, sys
from worker.startup import malloc

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
if sys.argv[1] == "kept" and not malloc.keep_pages():
    sys.exit("no glibc")


def step():
    pieces = [libc.malloc({PIECE_BYTES}) for _ in range({PIECES})]
    for piece in pieces:
        ctypes.memset(piece, 1, {PIECE_BYTES})
    for piece in pieces:
        libc.free(piece)


step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({STEPS}):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(way: str) -> int:
    """Pages that the system gave anew, in all steps but the first."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, check=False
    )
    if "no glibc" in ran.stderr:
        pytest.skip("needs glibc")
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout)


def test_pages_that_are_free_again_are_not_asked_for_anew() -> None:
    pages_of_a_step = PIECES * PIECE_BYTES // PAGE_BYTES
    assert faults("kept") < pages_of_a_step // 10


def test_left_to_itself_the_library_asks_for_them_in_every_step() -> None:
    """If that changes, there is no need for worker/startup/malloc.py."""
    pages_of_a_step = PIECES * PIECE_BYTES // PAGE_BYTES
    assert faults("left alone") > STEPS * pages_of_a_step // 10
