"""The worker process: spawn it, send it steps, hear its results, notice its death.

One worker for now; a replica of several ranks sends each plan to all of them and hears rank 0.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from typing import Any

import msgspec
import zmq

from protocol import sockets, wire
from protocol.config import WorkerConfig
from protocol.steps import FromWorker, Stop, ToWorker

log = logging.getLogger(__name__)

STOP_WAIT_S = 5.0


class WorkerLost(Exception):
    """The worker process ended or failed; the message says how, in one line."""


class Workers:
    """The worker of one replica. `socket` and `death` (a pidfd) are for the loop's poller."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], config: WorkerConfig, address: str
    ) -> None:
        self.socket = sockets.bind_router(context, address)
        self._decoder: wire.Decoder[FromWorker] = wire.Decoder(FromWorker)
        self._identity: bytes | None = None
        settings = msgspec.json.encode(msgspec.structs.replace(config, address=address)).decode()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "worker", "--config", settings], stdin=subprocess.DEVNULL
        )
        self.death = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToWorker) -> None:
        """To one that has just died, nothing: `death` says it, and its last words say why."""
        assert self._identity is not None, "the worker has not said that it is ready"
        try:
            self.socket.send_multipart([self._identity, *wire.encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def receive(self) -> FromWorker | None:
        """The next message, or None if there is none now. Raises WireError."""
        try:
            identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        self._identity = identity
        return self._decoder.decode(frames)

    def cause_of_death(self) -> str | None:
        """How the process ended, or None while it lives."""
        code = self._process.poll()
        if code is None:
            return None
        if code < 0:
            return f"the worker was killed by {signal.Signals(-code).name}"
        return f"the worker exited with code {code}"

    def stop(self) -> None:
        """Ask, then insist."""
        if self._process.poll() is None and self._identity is not None:
            self._try_to_send(Stop())
        else:
            self._process.terminate()
        try:
            self._process.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            log.warning("worker pid=%d does not stop; killing it", self.pid)
            self._process.kill()
            self._process.wait()
        os.close(self.death)
        self.socket.close()

    def _try_to_send(self, message: Any) -> None:
        try:
            self.send(message)
        except zmq.ZMQError:
            self._process.terminate()
