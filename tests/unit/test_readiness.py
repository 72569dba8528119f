"""Which processes an answer of /readyz shows to be ready."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tools.http.web import ServerReadiness, WebServer
from tools.processes import readiness
from tools.processes.readiness import ChildReadiness, ReadinessPoller

PAIR = {"gateway": "", "engine 1": "ipc://1", "engine 2": "ipc://2"}
ONE = {"gateway": "", "engine": "ipc://engine"}


def answer(is_ready: bool = True, **engines: str) -> ServerReadiness:
    """Return the answer of a server with several engines: number -> epoch of those ready."""
    by_address = {f"ipc://{number[1:]}": epoch for number, epoch in engines.items()}
    epochs = frozenset(by_address.values())
    return ServerReadiness(is_ready=is_ready, epochs=epochs, engines=by_address)


def one(*epochs: str, is_ready: bool = True) -> ServerReadiness:
    """Return the answer of a server with one engine."""
    return ServerReadiness(is_ready=is_ready, epochs=frozenset(epochs))


def test_each_engine_is_ready_by_itself() -> None:
    children = ChildReadiness(PAIR)
    assert children.ready(answer(is_ready=False)) == []
    assert children.ready(answer(_2="b")) == ["gateway", "engine 2"]
    assert children.ready(answer(_1="a", _2="b", is_ready=False)) == ["engine 1", "engine 2"]


def test_the_epoch_of_the_last_process_does_not_count_for_the_new_one() -> None:
    children = ChildReadiness(PAIR)
    children.ready(answer(_1="a", _2="b"))
    children.on_start("engine 1")
    assert children.ready(answer(_1="a", _2="b")) == ["gateway", "engine 2"]
    assert children.ready(answer(_2="b")) == ["gateway", "engine 2"]
    assert children.ready(answer(_1="c", _2="b")) == ["gateway", "engine 1", "engine 2"]


def test_a_single_engine_is_ready_with_a_new_epoch() -> None:
    children = ChildReadiness(ONE)
    assert children.ready(one("a")) == ["gateway", "engine"]
    children.on_start("engine")
    assert children.ready(one("a")) == ["gateway"]
    assert children.ready(one(is_ready=False)) == []
    assert children.ready(one("b")) == ["gateway", "engine"]


def test_a_gateway_is_ready_again_with_the_same_engines() -> None:
    children = ChildReadiness(ONE)
    children.ready(one("a"))
    children.on_start("gateway")
    assert children.ready(one("a")) == ["gateway", "engine"]


def test_a_server_whose_only_model_is_not_loaded_is_ready_without_its_engine() -> None:
    children = ChildReadiness(ONE)
    assert children.ready(one()) == ["gateway"]
    children.on_start("engine")
    assert children.ready(one()) == ["gateway"]
    assert children.ready(one("a")) == ["gateway", "engine"]


@contextmanager
def serving(status: int, body: object) -> Iterator[WebServer]:
    """Serve `body` at /readyz, and one model at /v1/models."""

    class ReadyzHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_probe = self.path == "/readyz"
            self.send_response(status if is_probe else 200)
            self.end_headers()
            models = {"data": [{"id": "tiny"}]}
            self.wfile.write(json.dumps(body if is_probe else models).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), ReadyzHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield WebServer(f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()


STATE = {"address": "ipc://1", "ready": True, "epoch": "a"}
LOST = {"address": "ipc://2", "ready": False, "epoch": "b"}


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (
            200,
            {"engine": {"epoch": "a"}},
            ServerReadiness(is_ready=True, model="tiny", epochs=frozenset("a")),
        ),
        (503, {"engine": {"epoch": "a"}}, ServerReadiness(is_ready=False)),
        (
            200,
            {"engine": {"epoch": "a"}, "replicas": [STATE, LOST]},
            ServerReadiness(
                is_ready=True, model="tiny", epochs=frozenset("a"), engines={"ipc://1": "a"}
            ),
        ),
        (
            503,
            {"engine": {"epoch": None}, "prefill": [STATE], "decode": [LOST]},
            ServerReadiness(is_ready=False, epochs=frozenset("a"), engines={"ipc://1": "a"}),
        ),
        (
            200,
            {
                "models": [
                    {"id": "a", "state": "ready", "engines": [STATE]},
                    {"id": "b", "state": "loading", "engines": [LOST]},
                ]
            },
            ServerReadiness(
                is_ready=True, model="tiny", epochs=frozenset("a"), engines={"ipc://1": "a"}
            ),
        ),
        (
            200,
            {"models": [{"id": "a", "state": "unloaded", "engines": []}]},
            ServerReadiness(is_ready=True, model="tiny", engines={}),
        ),
        (502, "a proxy answers", ServerReadiness(is_ready=False)),
    ],
)
def test_the_answers_of_a_server(status: int, body: object, expected: ServerReadiness) -> None:
    with serving(status, body) as server:
        assert server.readiness() == expected


class CountedProbes:
    """A server that is ready at the second probe."""

    def __init__(self) -> None:
        self.num_probes = 0

    def readiness(self) -> ServerReadiness:
        self.num_probes += 1
        return ServerReadiness(is_ready=self.num_probes > 1)


def test_a_hint_causes_a_probe_before_the_next_regular_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "PROBE_EVERY_S", 3600)
    with ReadinessPoller(CountedProbes()) as poller:
        for is_ready in (False, True):
            poller.hint()
            assert poller.changes.recv(1) == b"c"
            assert poller.latest == ServerReadiness(is_ready=is_ready)
