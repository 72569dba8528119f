"""The connection to the worker process: starts it, sends plans, receives results, detects its end.

There is one worker. With several ranks, each plan would be sent to all of them, and rank 0 would
answer.
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
from protocol.process_state import explain_kill, is_stopped, num_oom_kills
from protocol.start_gate import gate_descriptors
from protocol.steps import (
    FromWorker,
    Stop,
    TokenizerRead,
    ToWorker,
    WorkerFailed,
    WorkerReady,
)

log = logging.getLogger(__name__)

STOP_WAIT_S = 5.0
MAX_FOREIGN_PER_TURN = 100
FIRST_MESSAGES = TokenizerRead | WorkerReady | WorkerFailed


class WorkerLost(Exception):
    """The worker process ended, failed or does not respond. The message gives the cause."""

    def __init__(self, message: str, exit_code: int = ExitCode.WORKER_LOST) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class WorkerLink:
    """The worker process of one engine, and the socket that the worker connects to.

    The loop polls `socket`, and `death`: a pidfd that becomes readable when the process ends. The
    first peer that sends one of FIRST_MESSAGES is the worker. Messages of other peers are dropped
    and counted in `num_foreign_messages`.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], config: WorkerConfig, address: str
    ) -> None:
        self.socket = sockets.bind_router(context, address)
        self._decoder: wire.Decoder[FromWorker] = wire.Decoder(FromWorker)
        self.num_foreign_messages = 0
        self._identity: bytes | None = None
        self._reads_messages = False
        settings = msgspec.json.encode(msgspec.structs.replace(config, address=address)).decode()
        self._lifeline = Lifeline()
        self._num_oom_kills = num_oom_kills()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "worker", "--config", settings],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **self._lifeline.environment},
            pass_fds=[*self._lifeline.child_ends, *gate_descriptors()],
        )
        self._lifeline.on_started()
        self.death = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Whether the process has been stopped (SIGSTOP)."""
        return is_stopped(self.pid)

    def send(self, message: ToWorker) -> None:
        """Send a message. It is dropped if the worker has disconnected. The loop detects the end of
        the process by `death`."""
        assert self._identity is not None, "the worker has not sent a message"
        try:
            self.socket.send_multipart([self._identity, *wire.encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def receive(self) -> FromWorker | None:
        """Return the worker's next message, or None if there is none now. Raises WorkerLost if the
        message cannot be decoded, because later messages could not be trusted either."""
        for _ in range(MAX_FOREIGN_PER_TURN):
            try:
                identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if identity == self._identity or self._identity is None:
                message = self._read(identity, frames)
                if message is not None:
                    return message
            else:
                self.num_foreign_messages += 1
        return None

    def _read(self, identity: bytes, frames: list[bytes]) -> FromWorker | None:
        """Decode a message. Until the worker is known, return None for any message except
        FIRST_MESSAGES."""
        try:
            message = self._decoder.decode(frames)
        except WireError as error:
            if self._identity is not None:
                raise WorkerLost(f"the worker sent a malformed message: {error.message}") from None
            self.num_foreign_messages += 1
            return None
        if self._identity is None and not isinstance(message, FIRST_MESSAGES):
            self.num_foreign_messages += 1
            return None
        self._identity = identity
        self._reads_messages |= isinstance(message, WorkerReady)
        return message

    def exit_error(self) -> WorkerLost:
        """Wait for the process to end, and return an error that describes how it ended."""
        code = self._process.wait()
        if code < 0:
            number = signal.Signals(-code)
            why = explain_kill(number, self._num_oom_kills)
            return WorkerLost(f"the worker was killed by {number.name}" + (why and f": {why}"))
        is_specific = code in frozenset(ExitCode) and code not in (ExitCode.OK, ExitCode.FAILED)
        exit_code = ExitCode(code) if is_specific else ExitCode.WORKER_LOST
        why = self._lifeline.cause()
        return WorkerLost(f"the worker exited with code {code}" + (why and f": {why}"), exit_code)

    def stop(self) -> None:
        """Stop the process with a Stop message or SIGTERM, then with SIGKILL after STOP_WAIT_S.
        SIGTERM is sent to a process that still loads the model, because it reads no messages."""
        if self._process.poll() is None and self._reads_messages:
            self._try_to_send(Stop())
        else:
            self._process.terminate()
        if self.is_stopped:  # a stopped process reacts to SIGKILL only
            self._process.kill()
        try:
            self._process.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            log.warning("worker pid=%d did not stop in time; killing it", self.pid)
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
