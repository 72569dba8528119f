"""Ports for programs under test, which no other test uses at the same time.

A test chooses a port before the program listens on it. A port that is merely free at that moment
may be taken until then: Linux gives it to any connection or to any socket that is bound to port 0,
among them those of tests that run at the same time. So each process of tests reserves a block of
ports that Linux does not give away, for as long as the process runs.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from itertools import cycle

BLOCK = 200
BLOCKS = range(12_000, 32_000, BLOCK)
"""The first ports of all blocks. Linux gives away ports from 32,768 on (ip_local_port_range)."""


def free_port(adjacent: int = 1) -> int:
    """Return the first of some adjacent ports on which nothing listens.

    Raises OSError if there are none.
    """
    ports = _own_ports()
    for _ in range(BLOCK):
        port = next(ports)
        if port % BLOCK + adjacent <= BLOCK and all(map(_is_free, range(port, port + adjacent))):
            for _ in range(adjacent - 1):
                next(ports)
            return port
    raise OSError(f"no {adjacent} adjacent ports are free in the block of this process")


@cache
def _own_ports() -> Iterator[int]:
    """Reserve a block, and return its ports in an endless circle."""
    for first in random.sample(BLOCKS, len(BLOCKS)):
        if _reserve(first):
            return cycle(range(first, first + BLOCK))
    raise OSError("other processes of tests have reserved all ports")


def _reserve(first: int) -> bool:
    """Return whether no other process has reserved a block. Linux frees a name in the abstract
    namespace when the process ends, however it ends."""
    with ExitStack() as on_failure:
        lock = on_failure.enter_context(socket.socket(socket.AF_UNIX))
        try:
            lock.bind(f"\0tidegate-test-ports-{first}")
        except OSError:
            return False
        lock.detach()
        return True


def _is_free(port: int) -> bool:
    with socket.socket() as trial:
        try:
            trial.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
