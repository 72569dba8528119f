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
from protocol.config.worker import WorkerConfig
from protocol.errors import WireError
from protocol.exit_codes import ExitCode
from protocol.lifeline import Lifeline
from protocol.process_state import is_stopped, num_oom_kills, why_killed
from protocol.steps import FromWorker, Stop, ToWorker, WorkerFailed, WorkerReady

log = logging.getLogger(__name__)

STOP_WAIT_S = 5.0
STRANGERS_PER_TURN = 100


class WorkerLost(Exception):
    """The worker process ended or failed; the message says how, in one line."""

    def __init__(self, message: str, exit_code: int = ExitCode.WORKER_LOST) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class WorkerLink:
    """The worker of one replica. `socket` and `death` (a pidfd) are for the loop's poller.

    The worker is who first says that it is ready, or why it is not. `num_strange` counts what
    anybody else says at this socket; it is dropped.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], config: WorkerConfig, address: str
    ) -> None:
        self.socket = sockets.bind_router(context, address)
        self._decoder: wire.Decoder[FromWorker] = wire.Decoder(FromWorker)
        self.num_strange = 0
        self._identity: bytes | None = None
        settings = msgspec.json.encode(msgspec.structs.replace(config, address=address)).decode()
        self._lifeline = Lifeline()
        self._num_oom_kills = num_oom_kills()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "worker", "--config", settings],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **self._lifeline.environment},
            pass_fds=self._lifeline.child_ends,
        )
        self._lifeline.handed()
        self.death = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Somebody has stopped it (SIGSTOP)."""
        return is_stopped(self.pid)

    def send(self, message: ToWorker) -> None:
        """To one that has just died, nothing: `death` says it, and its last words say why."""
        assert self._identity is not None, "the worker has not said that it is ready"
        try:
            self.socket.send_multipart([self._identity, *wire.encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def receive(self) -> FromWorker | None:
        """The worker's next message, or None if there is none now. Raises WorkerLost where it makes
        no sense: nothing it says afterwards could be relied on."""
        for _ in range(STRANGERS_PER_TURN):
            try:
                identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if identity == self._identity or self._identity is None:
                message = self._read(identity, frames)
                if message is not None:
                    return message
            else:
                self.num_strange += 1
        return None

    def _read(self, identity: bytes, frames: list[bytes]) -> FromWorker | None:
        """None: it came from nobody we know, and is no greeting."""
        try:
            message = self._decoder.decode(frames)
        except WireError as error:
            if self._identity is not None:
                raise WorkerLost(f"the worker does not make sense: {error.message}") from None
            self.num_strange += 1
            return None
        if self._identity is None and not isinstance(message, WorkerReady | WorkerFailed):
            self.num_strange += 1
            return None
        self._identity = identity
        return message

    def lost(self) -> WorkerLost:
        """How the process ended, once `death` says that it has."""
        code = self._process.wait()
        if code < 0:
            number = signal.Signals(-code)
            why = why_killed(number, self._num_oom_kills)
            return WorkerLost(f"the worker was killed by {number.name}" + (why and f": {why}"))
        is_told = code in frozenset(ExitCode) and code not in (ExitCode.OK, ExitCode.FAILED)
        told = ExitCode(code) if is_told else ExitCode.WORKER_LOST
        why = self._lifeline.cause()
        return WorkerLost(f"the worker exited with code {code}" + (why and f": {why}"), told)

    def stop(self) -> None:
        """Ask, then insist."""
        if self._process.poll() is None and self._identity is not None:
            self._try_to_send(Stop())
        else:
            self._process.terminate()
        if self.is_stopped:  # it hears nothing but this
            self._process.kill()
        try:
            self._process.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            log.warning("worker pid=%d does not stop; killing it", self.pid)
            self._process.kill()
            self._process.wait()
        os.close(self.death)
        self._lifeline.close()
        self.socket.close()

    def _try_to_send(self, message: Any) -> None:
        try:
            self.send(message)
        except zmq.ZMQError:
            self._process.terminate()
