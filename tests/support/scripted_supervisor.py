"""A fake supervisor for tests of the gateway: a real control socket, and states that a test sets.

with ScriptedSupervisor(path, {"a": "ready", "b": "unloaded"}) as supervisor:
    supervisor.on_start = lambda model: ...
    supervisor.set("b", "ready")
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Self

from protocol.config.gateway import ModelConfig
from protocol.tools.control import (
    ControlError,
    ControlReader,
    CopyModel,
    DeleteModel,
    FromSupervisor,
    GetLibrary,
    GetModels,
    LoadState,
    ModelState,
    ModelStates,
    PullModel,
    ReportUse,
    RollEngines,
    StartModel,
    StopModel,
    ToSupervisor,
    encode,
)
from tests.support.waiting import eventually

ManageRequest = GetLibrary | PullModel | CopyModel | DeleteModel


class ScriptedSupervisor:
    """Sends the states of models to every connection, and records what it receives.

    on_start   called with each model that is requested; it may return why that is refused
    on_stop    the same for each model that is to be unloaded
    on_manage  called with each request about the models that clients manage; returns the replies
    managed    all these requests
    hosted     the models that gateways serve, which `set` sends; None: those of their own config
    started    the models of all StartModel messages
    stopped    the models of all StopModel messages
    reports    the last report of each connection, in the order of the connections
    is_late    whether a report gets no states in return, until `set` sends them
    """

    def __init__(self, path: Path, states: Mapping[str, LoadState]) -> None:
        self.path = path
        self.reset()
        self.reports: list[ReportUse] = []
        self.is_late = False
        self.hosted: list[ModelConfig] | None = None
        self._states = {name: ModelState(name=name, state=state) for name, state in states.items()}
        self._version = 1
        self._lock = threading.RLock()
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._accepting = threading.Thread(target=self._accept, name="scripted-supervisor")
        self._accepting.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        self.disconnect()
        for thread in self._threads:
            thread.join()

    def reset(self) -> None:
        """Accept all requests again, and empty what was recorded of them."""
        self.on_start: Callable[[str], str | None] = lambda model: None
        self.on_stop: Callable[[str], str | None] = lambda model: None
        self.on_manage: Callable[[ManageRequest], Iterable[FromSupervisor]] = lambda message: ()
        self.managed: list[ManageRequest] = []
        self.started: list[str] = []
        self.stopped: list[str] = []

    def disconnect(self) -> None:
        """Close all connections. New ones are accepted."""
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # the gateway has closed it
                    connection.shutdown(socket.SHUT_RDWR)

    def set(self, name: str, state: LoadState, error: str = "") -> None:
        """Change a state, and send all states to all connections."""
        with self._lock:
            self._states[name] = ModelState(name=name, state=state, error=error)
            self._publish()

    def _publish(self) -> None:
        self._version += 1
        for connection in self._connections:
            self._send(connection, self._all)

    def await_start(self, name: str) -> None:
        assert eventually(lambda: name in self.started), f"{name} was not requested"

    def await_report(self, claim: Callable[[ReportUse], bool]) -> None:
        """Wait until the last report of some connection has the current version, and `claim` is
        true of it."""
        assert eventually(
            lambda: any(r.version == self._version and claim(r) for r in self.reports)
        ), self.reports

    @property
    def _all(self) -> ModelStates:
        models = list(self._states.values())
        return ModelStates(version=self._version, models=models, hosted=self.hosted)

    @property
    def states(self) -> ModelStates:
        """What a command receives that has changed nothing."""
        return self._all

    def remove(self, name: str) -> None:
        """Remove a model, and send the others to all connections."""
        with self._lock:
            del self._states[name]
            self._publish()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the listener was shut down
                return
            with self._lock:
                self._connections.append(connection)
                self.reports.append(ReportUse(open={}))
                place = len(self.reports) - 1
            thread = threading.Thread(target=self._serve, args=(connection, place))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket, place: int) -> None:
        reader: ControlReader[ToSupervisor] = ControlReader(ToSupervisor)
        with connection:
            while data := _received(connection):
                for message in reader.push(data):
                    with self._lock:
                        self._receive(connection, place, message)
            with self._lock:
                self._connections.remove(connection)
                self.reports[place] = ReportUse(open={})

    def _receive(self, connection: socket.socket, place: int, message: ToSupervisor) -> None:
        match message:
            case ReportUse():
                self.reports[place] = message
                if message.version < self._version and not self.is_late:
                    self._send(connection, self._all)
            case StartModel(model=model):
                self.started.append(model)
                self._reply(connection, model, self.on_start(model))
            case StopModel(model=model):
                self.stopped.append(model)
                self._reply(connection, model, self.on_stop(model))
            case GetModels():
                self._send(connection, self._all)
            case GetLibrary() | PullModel() | CopyModel() | DeleteModel():
                self.managed.append(message)
                for reply in self.on_manage(message):
                    self._send(connection, reply)
            case RollEngines():
                raise AssertionError("a gateway does not restart engines")

    def _reply(self, connection: socket.socket, model: str, refusal: str | None) -> None:
        if refusal is None:
            self._send(connection, self._all)
        else:
            self._send(connection, ControlError(message=refusal, model=model))

    def _send(self, connection: socket.socket, message: FromSupervisor) -> None:
        with contextlib.suppress(OSError):  # the gateway has closed the connection
            connection.sendall(encode(message))


def _received(connection: socket.socket) -> bytes:
    """Return the next bytes; b"" if the gateway has closed the connection."""
    with contextlib.suppress(ConnectionError):
        return connection.recv(1 << 16)
    return b""
