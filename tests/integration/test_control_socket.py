"""The control socket of a real supervisor, whose gateway and engines are small programs."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL, SIGTERM
from textwrap import dedent

import pytest

from protocol.tools.control import (
    ControlReader,
    FromSupervisor,
    GetModels,
    ModelStates,
    ReportUse,
    RollEnded,
    RollEngines,
    RollProgress,
    StartModel,
    StopModel,
    control_address,
    encode,
)
from tests.support.ports import free_port
from tests.support.processes import Program, is_alive
from tests.support.waiting import HANG_S, eventually
from tools.failure import Failure
from tools.processes.control_client import ControlClient

SUPERVISED = str(Path(__file__).parents[1] / "support" / "supervised.py")

GATEWAY = """
import http.server, json, pathlib, signal, sys
from protocol.process.lifeline import attach_to_parent
attach_to_parent(signal.SIGTERM)
def states():
    for path in sorted(pathlib.Path(DIRECTORY).glob("*.ready")):
        yield {"address": path.stem, "ready": True, "epoch": path.read_text()}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = {"data": [{"id": "echo"}], "replicas": list(states())}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
    def log_message(self, *_): pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""
ENGINE = """
import os, pathlib, signal, sys
from protocol.process.lifeline import attach_to_parent
attach_to_parent(signal.SIGTERM)
state = pathlib.Path(DIRECTORY) / (ADDRESS + ".ready")
def stop(*_):
    state.unlink()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
if pathlib.Path(DIRECTORY, ADDRESS + ".broken").exists():
    sys.exit("no memory")
state.write_text(str(os.getpid()))
signal.pause()
"""
"""An engine whose epoch is its pid."""


class ControlledServer(Program):
    """A supervisor with a gateway, and engines with these names, groups and addresses."""

    def __init__(self, directory: Path, *engines: tuple[str, str], **options: object) -> None:
        self.directory = directory
        port = free_port()
        replaced = {"PORT": str(port), "DIRECTORY": repr(str(directory))}

        def source(text: str, **more: str) -> str:
            text = dedent(text)
            for word, value in (replaced | more).items():
                text = text.replace(word, value)
            return text

        commands = [["gateway", source(GATEWAY)]]
        for name, group in engines:
            commands.append([name, source(ENGINE, ADDRESS=repr(name)), group, name])
        wanted = {"port": port, "commands": commands, "directory": str(directory), **options}
        super().__init__(["-P", SUPERVISED, json.dumps(wanted)])

    def epoch(self, engine: str) -> str:
        path = self.directory / f"{engine}.ready"
        return path.read_text() if path.exists() else ""

    def connect(self) -> ControlClient:
        return ControlClient(self.directory, timeout_s=HANG_S)

    def states(self) -> dict[str, str]:
        with self.connect() as client:
            states = client.send(GetModels())
        assert isinstance(states, ModelStates)
        return {each.name: each.state for each in states.models}


class GatewayConnection:
    """A gateway's connection, which reports what the test wants."""

    def __init__(self, directory: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(HANG_S)
        self.socket.connect(control_address(directory))
        self.reader: ControlReader[FromSupervisor] = ControlReader(FromSupervisor)
        self.states = ModelStates(version=0, models=[])

    def report(self, **open: int) -> None:
        self.socket.sendall(encode(ReportUse(open=open, version=self.states.version)))

    def wait_for(self, model: str, state: str) -> None:
        """Receive states until `model` has this state. Do not confirm them."""
        while (model, state) not in {(each.name, each.state) for each in self.states.models}:
            data = self.socket.recv(1 << 16)
            assert data, "the supervisor has closed the connection"
            for message in self.reader.push(data):
                assert isinstance(message, ModelStates)
                self.states = message


@pytest.fixture
def directory() -> Iterator[Path]:
    with (
        tempfile.TemporaryDirectory() as name
    ):  # a short path: tmp_path may exceed a socket's limit
        yield Path(name)


REPLICAS = (("one", "engines"), ("two", "engines"))


def test_a_lost_replica_comes_back_and_a_rolling_restart_replaces_each_engine(
    directory: Path,
) -> None:
    with ControlledServer(directory, *REPLICAS) as server:
        server.line_with("ready echo")
        killed = server.epoch("one")
        os.kill(int(killed), SIGKILL)
        server.line_with("one is ready")
        before = {name: server.epoch(name) for name, _ in REPLICAS}
        assert before["one"] != killed
        with server.connect() as client:
            reports = [client.send(RollEngines())]
            while isinstance(reports[-1], RollProgress):
                reports.append(client.receive())
        assert reports[-1] == RollEnded()
        stages = [each.stage for each in reports if isinstance(each, RollProgress)]
        assert stages == ["draining", "starting", "ready"] * 2
        for name, _ in REPLICAS:
            assert server.epoch(name) != before[name]
            assert not is_alive(int(before[name]))
        server.signal(SIGTERM)
        assert server.end() == 0, server.output


def test_a_rolling_restart_stops_at_a_new_engine_that_fails(directory: Path) -> None:
    with ControlledServer(directory, *REPLICAS) as server:
        server.line_with("ready echo")
        survivor = server.epoch("two")
        (directory / "one.broken").touch()
        with server.connect() as client:
            reports = [client.send(RollEngines())]
            while isinstance(reports[-1], RollProgress):
                reports.append(client.receive())
        assert reports[-1] == RollEnded(error="one exited with code 1: no memory")
        assert is_alive(int(survivor))
        (directory / "one.broken").unlink()
        server.line_with("one is ready")


MODELS = (("a", "a"), ("b", "b"))


def test_models_are_loaded_on_request_and_unloaded_when_no_gateway_uses_them(
    directory: Path,
) -> None:
    with ControlledServer(directory, *MODELS, models=["a", "b"], max_loaded=1) as server:
        server.line_with("ready echo")
        assert server.states() == {"a": "unloaded", "b": "unloaded"}
        gateway = GatewayConnection(directory)
        gateway.report()
        gateway.socket.sendall(encode(StartModel(model="a")))
        gateway.wait_for("a", "ready")
        gateway.report(a=1)
        first = int(server.epoch("a"))

        with server.connect() as client:
            assert isinstance(client.send(StartModel(model="b")), ModelStates)
        gateway.wait_for("a", "stopping")
        gateway.report(a=1)
        assert server.states() == {"a": "stopping", "b": "waiting"}
        assert is_alive(first)
        gateway.report(a=0)
        gateway.wait_for("b", "ready")
        assert not is_alive(first)
        assert server.states() == {"a": "unloaded", "b": "ready"}

        with server.connect() as client, pytest.raises(Failure, match="no model is named c"):
            client.send(StartModel(model="c"))
        with server.connect() as client:
            client.send(StopModel(model="b"))
        gateway.socket.close()  # then it cannot use the model any more
        assert eventually(lambda: server.states()["b"] == "unloaded")
        server.signal(SIGTERM)
        assert server.end() == 0, server.output


def test_a_model_that_cannot_be_loaded_does_not_end_the_server(directory: Path) -> None:
    (directory / "a.broken").touch()
    with ControlledServer(directory, *MODELS, models=["a", "b"]) as server:
        server.line_with("ready echo")
        with server.connect() as client:
            client.send(StartModel(model="a"))
            assert eventually(lambda: server.states()["a"] == "failed")
            with pytest.raises(Failure, match="a exited with code 1: no memory"):
                client.send(StartModel(model="a"))
        with server.connect() as client:
            client.send(StartModel(model="b"))
        assert eventually(lambda: server.states()["b"] == "ready")


def test_a_peer_that_sends_no_requests_is_disconnected_and_others_are_served(
    directory: Path,
) -> None:
    with ControlledServer(directory, *MODELS, models=["a", "b"]) as server:
        server.line_with("ready echo")
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"x" * (2 << 20)):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(HANG_S)
                peer.connect(control_address(directory))
                try:
                    peer.sendall(garbage)
                    assert peer.recv(1) == b""
                except ConnectionError:  # it was closed while we were sending
                    pass
        assert server.states() == {"a": "unloaded", "b": "unloaded"}


def test_a_peer_that_reads_nothing_does_not_stop_the_supervisor(directory: Path) -> None:
    with ControlledServer(directory, *MODELS, models=["a", "b"]) as server:
        server.line_with("ready echo")
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(HANG_S)
            peer.connect(control_address(directory))
            requests = encode(GetModels()) * 100_000
            with pytest.raises(ConnectionError):
                peer.sendall(requests)
            assert server.states() == {"a": "unloaded", "b": "unloaded"}
