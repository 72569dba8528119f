"""Observes a server while it is attacked: whether the streams of other clients end well, how long
/livez takes, and how much the server's processes grow.

The attacker runs in a process of its own, so that its threads take no time from the clients here.
So does the client of /livez (livez_probe.py).
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Self
from urllib.parse import urlsplit

from tests.support.processes import ROOT
from tests.support.waiting import eventually
from tests.torture import livez_probe
from tests.torture.observers import TortureClient

LIVEZ_MS = 100.0
"""The longest time that /livez may take, not counting the wait for a CPU."""
ATTACK_TIMEOUT_S, STREAM_TIMEOUT_S, SHRINK_TIMEOUT_S = 360.0, 90.0, 20.0
FINISHED = "finished"


@dataclass(slots=True)
class Witnessed:
    """The observations during an attack.

    flat_mib        most MiB that a process may gain
    livez_ms        the longest time of /livez, without the wait for a CPU
    ends            how each stream ended: `TortureClient.end`
    before, after   MiB by name of process
    """

    flat_mib: int
    livez_ms: float = 0.0
    ends: list[str] = field(default_factory=list)
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)

    @property
    def num_streams(self) -> int:
        return self.ends.count(FINISHED)

    @property
    def lost(self) -> list[str]:
        return [end for end in self.ends if end != FINISHED]

    def complaints(self, slack: float | None = 1.0) -> list[str]:
        """Return what is wrong. `slack` stretches LIVEZ_MS; None: times are not checked."""
        found = [f"a stream of another client was lost: {end}" for end in self.lost]
        if not self.num_streams:
            found.append("no stream of another client finished")
        for name, before in self.before.items():
            if self.after[name] - before > self.flat_mib:
                found.append(f"{name}: grew from {before} to {self.after[name]} MiB")
        if slack is not None and self.livez_ms > LIVEZ_MS * slack:
            found.append(f"/livez took {self.livez_ms:.0f} ms")
        return found

    def sizes(self) -> list[str]:
        """Return the cells of a table that show how each process has grown."""
        return [f"{before} -> {self.after[name]}" for name, before in self.before.items()]


class Witnesses:
    """Clients that use a server while it is attacked, during the `with` block.

    Each of `num_streams` clients streams one answer after the other, at least one. Another client
    requests /livez all the time.

    gateway_pid    the process that answers /livez
    sizes          returns the MiB of memory of the processes that may not grow, by name
    start_stream   starts a stream of the given client
    """

    def __init__(
        self,
        url: str,
        gateway_pid: int,
        sizes: Callable[[], dict[str, int]],
        start_stream: Callable[[TortureClient], None],
        *,
        num_streams: int,
        flat_mib: int,
    ) -> None:
        self._url = url
        self._probe = ProbeProcess(url, gateway_pid)
        self._sizes = sizes
        self._start_stream = start_stream
        self._num_streams = num_streams
        self._witnessed = Witnessed(flat_mib)
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(num_streams)
        self._running: list[Future[None]] = []

    def __enter__(self) -> Witnessed:
        self._witnessed.before = self._sizes()
        self._probe.start()
        self._running = [self._pool.submit(self._stream) for _ in range(self._num_streams)]
        return self._witnessed

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._pool.shutdown()
        self._witnessed.livez_ms = self._probe.stop()
        for job in self._running:
            job.result()
        eventually(self._is_flat, within_s=SHRINK_TIMEOUT_S)
        self._witnessed.after = self._sizes()

    def _stream(self) -> None:
        while True:
            with TortureClient(self._url) as client:
                self._start_stream(client)
                eventually(partial(getattr, client, "end"), within_s=STREAM_TIMEOUT_S)
                self._witnessed.ends.append(client.end or "it never ended")
            if self._is_over.is_set():
                return

    def _is_flat(self) -> bool:
        before = self._witnessed.before
        return all(
            size - before[name] <= self._witnessed.flat_mib for name, size in self._sizes().items()
        )


class ProbeProcess:
    """The process that requests /livez of the server at `url` all the time."""

    def __init__(self, url: str, gateway_pid: int) -> None:
        self._arguments = (urlsplit(url).netloc, str(gateway_pid))
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the process, and wait for the response to its first request."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", livez_probe.__name__, *self._arguments],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        ready = self._process.stdout.readline().strip()
        assert ready == livez_probe.READY, "the first request of /livez failed"

    def stop(self) -> float:
        """Stop the process, and return the longest time of a request in milliseconds."""
        assert self._process is not None, "not started"
        with self._process:
            try:
                printed, _ = self._process.communicate(timeout=livez_probe.REQUEST_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                raise
        assert not self._process.returncode, "a request of /livez failed"
        return float(printed)


@dataclass(frozen=True, slots=True)
class AttackerResult:
    """The output of an attacker's process, and the last line of its errors if it failed."""

    printed: str
    failure: str = ""

    @classmethod
    def from_process(cls, done: subprocess.CompletedProcess[str]) -> Self:
        if not done.returncode:
            return cls(done.stdout)
        reason = done.stderr.strip().rpartition("\n")[2]
        return cls(done.stdout, reason or f"the attacker ended with {done.returncode}")


def run_attacker(module: str, *options: str) -> AttackerResult:
    """Run a module with these options in a new process until it ends."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, *options],
        check=False,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=ATTACK_TIMEOUT_S,
    )
    return AttackerResult.from_process(done)
