"""Which processes an answer of /readyz shows to be ready."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tools.http.web import ServerReadiness, WebServer
from tools.processes.readiness import ChildReadiness

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
    readiness = ChildReadiness(PAIR)
    assert readiness.ready(answer(is_ready=False)) == []
    assert readiness.ready(answer(_2="b")) == ["gateway", "engine 2"]
    assert readiness.ready(answer(_1="a", _2="b", is_ready=False)) == ["engine 1", "engine 2"]


def test_the_epoch_of_the_last_process_does_not_count_for_the_new_one() -> None:
    readiness = ChildReadiness(PAIR)
    readiness.ready(answer(_1="a", _2="b"))
    readiness.on_start("engine 1")
    assert readiness.ready(answer(_1="a", _2="b")) == ["gateway", "engine 2"]
    assert readiness.ready(answer(_2="b")) == ["gateway", "engine 2"]
    assert readiness.ready(answer(_1="c", _2="b")) == ["gateway", "engine 1", "engine 2"]


def test_a_single_engine_is_ready_with_a_new_epoch() -> None:
    readiness = ChildReadiness(ONE)
    assert readiness.ready(one("a")) == ["gateway", "engine"]
    readiness.on_start("engine")
    assert readiness.ready(one("a")) == ["gateway"]
    assert readiness.ready(one(is_ready=False)) == []
    assert readiness.ready(one("b")) == ["gateway", "engine"]


def test_a_gateway_is_ready_again_with_the_same_engines() -> None:
    readiness = ChildReadiness(ONE)
    readiness.ready(one("a"))
    readiness.on_start("gateway")
    assert readiness.ready(one("a")) == ["gateway", "engine"]


def test_a_server_whose_only_model_is_not_loaded_is_ready_without_its_engine() -> None:
    readiness = ChildReadiness(ONE)
    assert readiness.ready(one()) == ["gateway"]
    readiness.on_start("engine")
    assert readiness.ready(one()) == ["gateway"]
    assert readiness.ready(one("a")) == ["gateway", "engine"]


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
