"""Requests /livez of a server all the time, until standard input ends. Then it prints the longest
time in milliseconds. After the first response it prints "ready".

    python -m tests.torture.livez_probe HOST:PORT GATEWAY_PID

It is a process of its own, because its threads would otherwise wait for Python's lock while other
threads have no processor, and that would look like a slow server.
"""

from __future__ import annotations

import argparse
import http.client
import os
import select
import sys
import time
from pathlib import Path

EVERY_S = 0.01
REQUEST_TIMEOUT_S = 60
READY = "ready"


class LivezProbe:
    """Times requests of /livez, not counting the wait for a processor.

    gateway_pid   the process that answers
    """

    def __init__(self, address: str, gateway_pid: int) -> None:
        self.longest_ms = 0.0
        self._connection = http.client.HTTPConnection(address, timeout=REQUEST_TIMEOUT_S)
        processes = (gateway_pid, os.getpid())
        self._schedstats = [Path(f"/proc/{pid}/task/{pid}/schedstat") for pid in processes]

    def measure(self) -> None:
        """Send a request and wait for its response. Raises OSError or HTTPException."""
        started_at, waited_s = time.perf_counter(), self._waited_s()
        self._connection.request("GET", "/livez")
        self._connection.getresponse().read()
        took_s = time.perf_counter() - started_at - (self._waited_s() - waited_s)
        self.longest_ms = max(self.longest_ms, took_s * 1000)

    def _waited_s(self) -> float:
        """Return how long the two main threads were ready to run without a processor."""
        files = (file for file in self._schedstats if file.exists())
        return sum(int(file.read_text().split()[1]) for file in files) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.livez_probe")
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("gateway_pid", type=int)
    options = parser.parse_args()
    probe = LivezProbe(options.address, options.gateway_pid)
    probe.measure()
    print(READY, flush=True)
    while not select.select([sys.stdin], [], [], EVERY_S)[0]:
        probe.measure()
    print(f"{probe.longest_ms:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
