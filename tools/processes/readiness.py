"""Finds out which processes of a server are ready, from the readiness that the server reports."""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol, Self

from tools.http.web import ServerReadiness

PROBE_EVERY_S = 0.1
PROBE_AT_MOST_EVERY_S = 0.01
"""Shortest interval of probes, while the processes print many lines."""
NOT_READY = ServerReadiness(is_ready=False)


class ReadinessProbe(Protocol):
    """The interface of a server that `ReadinessPoller` polls."""

    def readiness(self) -> ServerReadiness | None:
        """Return whether the server is ready; None if it does not answer. A thread calls this
        several times a second."""


class ChildReadiness:
    """Decides which child processes the server's answers show to be ready.

    A gateway may still report the last process of an engine as ready after a new one was started.
    So an answer counts for an engine only if it has an epoch that the last process did not have.

    addresses   child -> address of its engine; "" for other processes
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = dict(addresses)
        self._latest = NOT_READY
        self._old: defaultdict[str, frozenset[str]] = defaultdict(frozenset)

    def add(self, child: str, address: str) -> None:
        """Add a child that is not started yet."""
        self._addresses[child] = address

    def remove(self, child: str) -> None:
        """Remove a child that is down."""
        del self._addresses[child]

    def on_start(self, child: str) -> None:
        """Record that a process of `child` was started. Known epochs belong to old processes."""
        if self._addresses[child]:
            self._old[child] |= self._epochs(child, self._latest)

    def ready(self, answer: ServerReadiness) -> list[str]:
        """Return the children that `answer` shows to be ready."""
        self._latest = answer
        return [child for child in self._addresses if self._is_ready(child, answer)]

    def _is_ready(self, child: str, answer: ServerReadiness) -> bool:
        if not self._addresses[child]:
            return answer.is_ready
        return bool(self._epochs(child, answer) - self._old[child])

    def _epochs(self, child: str, answer: ServerReadiness) -> frozenset[str]:
        """Return the epochs that may belong to the child's process."""
        if answer.engines is None:
            return answer.epochs
        epoch = answer.engines.get(self._addresses[child])
        return frozenset() if epoch is None else frozenset([epoch])


class ReadinessPoller:
    """Polls the server's readiness in a thread of its own, while the server or a process of it is
    starting: every PROBE_EVERY_S seconds, and after each `hint`.

    changes   socket that receives a byte when the server first answers, and whenever its answer has
              changed
    latest    the last answer; None before the first one
    """

    def __init__(self, server: ReadinessProbe) -> None:
        self.latest: ServerReadiness | None = None
        self._server = server
        self._is_sent = False  # whether `latest` was sent since the last start of a process
        self.changes, self._sender = socket.socketpair()
        self._is_closed = False
        self._is_needed = threading.Event()
        self._wakeup = threading.Event()
        self._thread = threading.Thread(target=self._run, name="readiness", daemon=True)

    def __enter__(self) -> Self:
        self._is_needed.set()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_closed = True
        self._wakeup.set()
        self._is_needed.set()
        self._thread.join()
        self.changes.close()
        self._sender.close()

    @property
    def model(self) -> str | None:
        """The name of the server's first model, if the server was ready."""
        return None if self.latest is None else self.latest.model

    def restart(self) -> None:
        """Poll, and send the next answer even if it equals the last one."""
        self._is_sent = False
        self._is_needed.set()

    def pause(self) -> None:
        """Poll no more until `restart`."""
        self._is_needed.clear()

    def hint(self) -> None:
        """Probe the server soon, because a process may have become ready. Processes that become
        ready log a line, so the supervisor need not wait for the next regular probe."""
        self._wakeup.set()

    def _run(self) -> None:
        while True:
            self._is_needed.wait()
            time.sleep(PROBE_AT_MOST_EVERY_S)
            self._wakeup.wait(PROBE_EVERY_S - PROBE_AT_MOST_EVERY_S)
            self._wakeup.clear()
            if self._is_closed:
                return
            answer = self._server.readiness()
            if answer is None or (self._is_sent and answer == self.latest):
                continue
            self._is_sent, self.latest = True, answer
            self._sender.send(b"c")
