"""The supervisor's end of the control socket. It never waits for a peer."""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from protocol.tools.control import (
    ControlReader,
    FromSupervisor,
    ToSupervisor,
    control_address,
    encode,
)
from protocol.wire.errors import WireError
from tools.processes.actions import Action

READ_BYTES = 1 << 16
MAX_UNSENT_BYTES = 1 << 18
"""A peer that does not read is disconnected when more than this waits for it."""
MAX_CONNECTIONS = 256


@dataclass(slots=True, eq=False)
class ControlConnection:
    """A connection of a command or gateway to the supervisor, with the bytes not sent yet."""

    number: int
    socket: socket.socket
    reader: ControlReader[ToSupervisor] = field(default_factory=lambda: ControlReader(ToSupervisor))
    unsent: bytearray = field(default_factory=bytearray)


class ControlServer:
    """Listens on the control socket of a run directory.

    selector     waits for the sockets. The data of each socket is a function without arguments,
                 which must be called when the socket is ready, and returns actions
    on_request   is called with the number of a connection and a request
    on_closed    is called with the number of a connection that has ended
    """

    def __init__(
        self,
        directory: Path,
        selector: selectors.BaseSelector,
        *,
        on_request: Callable[[int, ToSupervisor], list[Action]],
        on_closed: Callable[[int], list[Action]],
    ) -> None:
        self._selector = selector
        self._on_request, self._on_closed = on_request, on_closed
        self._connections: dict[int, ControlConnection] = {}
        self._numbers = itertools.count(1)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        path = Path(control_address(directory))
        path.unlink(missing_ok=True)  # of a server that was killed; this one holds the directory
        self._listener.bind(str(path))
        self._listener.listen()
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Send what can be sent at once, and close all connections."""
        for connection in list(self._connections.values()):
            self._flush(connection)
            self._close(connection)
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._listener)
        self._listener.close()

    def send(self, number: int, message: FromSupervisor) -> None:
        """Send a message on a connection, now or as soon as the peer reads. Do nothing if the
        connection has ended."""
        connection = self._connections.get(number)
        if connection is None:
            return
        is_waiting = bool(connection.unsent)
        connection.unsent += encode(message)
        if not is_waiting:
            self._flush(connection)
        elif len(connection.unsent) > MAX_UNSENT_BYTES:
            connection.unsent.clear()
            with contextlib.suppress(OSError):  # the peer may be gone
                connection.socket.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> list[Action]:
        with contextlib.suppress(BlockingIOError):
            accepted, _ = self._listener.accept()
            if len(self._connections) >= MAX_CONNECTIONS:
                accepted.close()
                return []
            accepted.setblocking(False)
            connection = ControlConnection(next(self._numbers), accepted)
            self._connections[connection.number] = connection
            self._selector.register(accepted, selectors.EVENT_READ, lambda: self._serve(connection))
        return []

    def _serve(self, connection: ControlConnection) -> list[Action]:
        """Send pending bytes and handle received requests, without blocking."""
        self._flush(connection)
        actions: list[Action] = []
        try:
            data = connection.socket.recv(READ_BYTES)
            requests = connection.reader.push(data) if data else None
        except BlockingIOError:
            return []
        except (OSError, WireError):
            requests = None
        if requests is None:
            self._close(connection)
            return self._on_closed(connection.number)
        for request in requests:
            actions += self._on_request(connection.number, request)
        return actions

    def _flush(self, connection: ControlConnection) -> None:
        """Send as much as possible now. A peer that is gone is noticed when it is read."""
        try:
            while connection.unsent:
                del connection.unsent[: connection.socket.send(connection.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            connection.unsent.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        key = self._selector.get_key(connection.socket)
        if key.events != events:
            self._selector.modify(connection.socket, events, key.data)

    def _close(self, connection: ControlConnection) -> None:
        del self._connections[connection.number]
        self._selector.unregister(connection.socket)
        connection.socket.close()
