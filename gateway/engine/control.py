"""The gateway's connection to the supervisor, for greenlets: `model_loads.ModelLoads` plus I/O.

One connection per process is shared by all requests. It is opened after the fork, and again after
it was lost. A command, such as StopModel, has a short connection of its own, because a reply does
not name its request.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

import gevent
from gevent import socket
from gevent.lock import Semaphore

from gateway.engine.model_loads import ModelLoads
from protocol.tools.control import (
    REPORT_EVERY_S,
    ControlError,
    ControlReader,
    FromSupervisor,
    ModelStates,
    StopModel,
    ToSupervisor,
    encode,
)
from protocol.wire.errors import EngineNotReady, WireError

log = logging.getLogger(__name__)

RECONNECT_S = 0.25
COMMAND_TIMEOUT_S = 10.0
UNREACHABLE, CLOSED = "the supervisor cannot be reached", "it has closed the connection"
_READ_BYTES = 1 << 16


class SupervisorLink:
    """The connection of this process to its supervisor.

    path        path of the supervisor's socket
    loads       the models; this object feeds it with the supervisor's messages
    on_change   called after messages have changed `loads`, and after the connection was lost
    """

    def __init__(self, path: str, loads: ModelLoads, on_change: Callable[[], None]) -> None:
        self.loads = loads
        self._path = path
        self._on_change = on_change
        self._socket: socket.socket | None = None
        self._sending = Semaphore(1)
        self._greenlet: gevent.Greenlet[..., None] | None = None

    def start(self) -> None:
        """Connect, and stay connected until `close`. Call this after the fork."""
        if self._greenlet is None:
            self._greenlet = gevent.spawn(self._run)

    def close(self) -> None:
        """Disconnect. The supervisor then counts no requests of this process."""
        if self._greenlet is not None:
            self._greenlet.kill()

    def request_load(self, model: str) -> None:
        """Have the supervisor load `model` for a kept request, unless that was requested already.
        Without a connection, do nothing: `on_change` is called when there is one again."""
        if self._socket is not None and (message := self.loads.start(model)) is not None:
            self._send(self._socket, message)

    def stop_model(self, model: str) -> int:
        """Have the supervisor unload `model`, and return the version of its states after that.
        Raises EngineNotReady if it refuses, or cannot be reached."""
        try:
            reply = self._command(StopModel(model=model))
        except (OSError, WireError) as error:
            raise EngineNotReady(f"{UNREACHABLE}: {error}") from None
        if isinstance(reply, ControlError):
            raise EngineNotReady(f"the model {model} cannot be unloaded: {reply.message}")
        return reply.version

    # ---- the connection

    def _run(self) -> None:
        while True:
            with contextlib.suppress(OSError), _connected(self._path) as connection:
                self._socket = connection
                try:
                    self._converse(connection)
                except WireError as error:
                    log.error("the connection to the supervisor is closed: %s", error)
                finally:
                    self._socket = None
                    self.loads.on_disconnected()
                    self._on_change()
            gevent.sleep(RECONNECT_S)

    def _converse(self, connection: socket.socket) -> None:
        """Send the supervisor reports of model use, and receive messages from it, until the
        connection is lost."""
        reader: ControlReader[FromSupervisor] = ControlReader(FromSupervisor)
        report_at = time.monotonic()
        while True:
            if self.loads.must_report or time.monotonic() >= report_at:
                self._send(connection, self.loads.report())
                report_at = time.monotonic() + REPORT_EVERY_S
            connection.settimeout(max(0.001, report_at - time.monotonic()))
            try:
                data = connection.recv(_READ_BYTES)
            except TimeoutError:
                continue
            if not data:
                return
            for message in reader.push(data):
                self.loads.on_message(message)
            self._on_change()

    def _send(self, connection: socket.socket, message: ToSupervisor) -> None:
        """Send a message. If the connection is lost, `_converse` notices that, too."""
        with self._sending, contextlib.suppress(OSError):  # no line may be cut by another one
            connection.sendall(encode(message))

    def _command(self, message: ToSupervisor) -> ModelStates | ControlError:
        """Send a message on a connection of its own, and return the reply."""
        for reply in self._replies(message, COMMAND_TIMEOUT_S):
            if isinstance(reply, ModelStates | ControlError):
                return reply
            if reply is None:
                raise TimeoutError("it does not answer")
        raise OSError(CLOSED)

    def _replies(self, message: ToSupervisor, every_s: float) -> Iterator[FromSupervisor | None]:
        """Send a message on a connection of its own, and yield each reply. Yield None whenever
        there was none for `every_s` seconds. Raises OSError or WireError."""
        reader: ControlReader[FromSupervisor] = ControlReader(FromSupervisor)
        with _connected(self._path) as connection:
            connection.settimeout(every_s)
            connection.sendall(encode(message))
            while True:
                try:
                    data = connection.recv(_READ_BYTES)
                except TimeoutError:
                    yield None
                    continue
                if not data:
                    return
                yield from reader.push(data)

    def manage(self, message: ToSupervisor, every_s: float) -> Iterator[FromSupervisor | None]:
        """Have the supervisor change or list the models that clients manage. Yield its replies,
        without end, and None whenever there was none for `every_s` seconds.

        Raises the error with which it refuses. Raises EngineNotReady if it cannot be reached.
        """
        try:
            for reply in self._replies(message, every_s):
                if isinstance(reply, ControlError):
                    raise reply.error()
                yield reply
        except (OSError, WireError) as error:
            raise EngineNotReady(f"{UNREACHABLE}: {error}") from None
        raise EngineNotReady(f"{UNREACHABLE}: {CLOSED}")


def _connected(path: str) -> socket.socket:
    """Return a new connection to the supervisor. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection
