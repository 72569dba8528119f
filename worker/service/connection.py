"""The worker's connection to its engine, which has started it or which it has joined.

A worker that the engine has started ends with the engine (protocol/process/lifeline.py). A worker
that another machine has started ends when the connection is lost (`EngineWatch`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading

import zmq

from protocol.process.exit_codes import ExitCode
from protocol.wire import codec, sockets
from protocol.wire.cluster_key import ClusterKey
from protocol.worker.steps import FromWorker, ToWorker

log = logging.getLogger("worker")

PARENT_CHECK_MS = 5_000
SEND_WAIT_MS = 30_000
FINAL_SEND_MS = 2_000
STOP_GRACE_S = 2.0
"""Seconds in which a worker may still end by itself after the connection was lost. The engine may
close the connection right after its Stop."""
WATCH_MS = 200


class ParentGone(Exception):
    """Raised if the engine process, which started this one, has ended or no longer reads."""


class EngineConnection:
    """The worker's connection to the engine. It polls the socket only if no message has arrived
    yet, or if a send would block."""

    def __init__(self, socket: zmq.Socket[bytes], parent: int | None = None) -> None:
        """Use a connected DEALER.

        parent   process id of the engine that has started this process; None: another one did
        """
        self._socket = socket
        self._decoder: codec.Decoder[ToWorker] = codec.Decoder(ToWorker)
        self._parent = parent
        self._pollers: dict[tuple[int, ...], zmq.Poller] = {}

    def receive(self) -> ToWorker:
        """Return the next message. Raises ParentGone if the engine has ended."""
        self.wait()
        return self._decoder.decode(self._socket.recv_multipart())

    def has_message(self, timeout_ms: int) -> bool:
        """Return whether there is a message, after waiting for one for at most `timeout_ms`."""
        return bool(self._socket.poll(timeout_ms))

    def wait(self, *wakeups: int) -> bool:
        """Wait for a message, or until one of the file descriptors is readable. Return whether
        there is a message. Raises ParentGone if the engine has ended."""
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            return True
        poller = self._poller(wakeups)
        while not (ready := dict(poller.poll(PARENT_CHECK_MS))):
            if self._parent is not None and os.getppid() != self._parent:
                raise ParentGone
        return self._socket in ready

    def _poller(self, wakeups: tuple[int, ...]) -> zmq.Poller:
        """Return a poller of the socket and these file descriptors. The poller is created at its
        first use."""
        if (poller := self._pollers.get(wakeups)) is None:
            poller = self._pollers[wakeups] = zmq.Poller()
            for source in (self._socket, *wakeups):
                poller.register(source, zmq.POLLIN)
        return poller

    def send(self, message: FromWorker) -> None:
        """Send a message. Raises ParentGone if the engine reads nothing for SEND_WAIT_MS."""
        frames = codec.encode(message)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            if not self._socket.poll(SEND_WAIT_MS, zmq.POLLOUT):
                raise ParentGone from None
            self._socket.send_multipart(frames)

    def send_final(self, message: FromWorker) -> None:
        """Send a last message. Give up if the engine reads nothing for FINAL_SEND_MS."""
        if self._socket.poll(FINAL_SEND_MS, zmq.POLLOUT):
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart(codec.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """May be called twice."""
        self._socket.close()


class EngineWatch:
    """A thread that ends this process when the connection to the engine of another machine is lost.
    It does so once `has_joined` is set; before, it only warns.

    The main thread cannot do so, because it may wait for another rank that will never answer. The
    process ends without cleaning up, as a worker does that its engine has started.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, key: ClusterKey | None
    ) -> None:
        """Connect to an engine, and watch the connection from now on. Raises ValueError as
        `sockets.connect_monitored` does."""
        self.socket, self._monitor = sockets.connect_monitored(context, address, key)
        self._address = address
        self.has_joined = threading.Event()
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching, and close the socket."""
        self._is_stopping.set()
        self._thread.join()
        sockets.close_monitored(self.socket, self._monitor)

    def _run(self) -> None:
        has_warned = False
        is_connected = True  # or not known yet
        while not self._is_stopping.is_set():
            self._monitor.poll(WATCH_MS)
            events = sockets.read_connection_events(self._monitor)
            # The last state is kept: `has_joined` may be set after a loss, without another event.
            is_connected = events[-1] if events else is_connected
            if is_connected and all(events):
                continue
            if self.has_joined.is_set():
                self._end()
            elif not has_warned:
                has_warned = True
                log.warning(
                    "cannot connect to %s yet: is the engine running, with the same cluster key?",
                    self._address,
                )

    def _end(self) -> None:
        """End the process, unless it ends by itself."""
        if not self._is_stopping.wait(STOP_GRACE_S):
            log.error("the connection to the engine at %s was lost", self._address)
            logging.shutdown()
            os._exit(ExitCode.FAILED)
