"""Measures how fast the cores together read memory, which bounds the decoding of one request: each
token reads all weights that it is computed with.

Needs neither torch nor the compiled kernels. The C library's memchr searches zeros for another
byte, so it reads a buffer from its start to its end, and threads search at the same time.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import thread_time

from worker.device import machine
from worker.device.measurements import stored, stored_or_measured

BUFFER_BYTES = 64 << 20
"""Bytes that each thread reads. Together they exceed the caches of most processors."""
ROUNDS = 5
"""The fastest round counts, because other programs only make rounds slower."""


def read_bytes_per_s(threads: int, folder: Path | None) -> float:
    """Return the bytes per second that `threads` threads read from memory together.

    folder   directory that caches the measurement; None: none
    """
    return stored_or_measured(
        folder, _facts(threads), float, lambda: measured_bytes_per_s(threads), _is_valid
    ).value


def stored_bytes_per_s(threads: int, folder: Path | None) -> float | None:
    """Return the same from the cache; None if it was not measured yet."""
    return stored(folder, _facts(threads), float, _is_valid)


def _facts(threads: int) -> list[str]:
    """Return what the measurement depends on."""
    return ["memory reads", machine.cpu_name(), f"{threads} threads"]


def _is_valid(speed: float) -> bool:
    return speed > 0


def measured_bytes_per_s(threads: int, buffer_bytes: int = BUFFER_BYTES) -> float:
    """Measure the same, without a cache: the sum of the fastest round of each thread.

    Rounds are timed by the CPU time of their thread, so programs that take turns with it on a core
    do not count.
    """
    search = ctypes.CDLL(None).memchr  # a foreign function runs without the interpreter's lock
    search.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    search.restype = ctypes.c_void_p

    def fastest(number: int) -> float:
        buffer = ctypes.create_string_buffer(buffer_bytes)
        place = ctypes.addressof(buffer)
        ctypes.memset(place, 0, buffer_bytes)  # pages that were never written are all one page
        seconds = []
        for _ in range(ROUNDS):
            started = thread_time()
            assert search(place, 1, buffer_bytes) is None
            seconds.append(thread_time() - started)
        return buffer_bytes / min(seconds)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(fastest, range(threads)))
