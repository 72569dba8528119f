"""Connections of HTTP clients: when they are told to send a body, and when they are closed."""

from __future__ import annotations

import json

import pytest

from protocol.config.gateway import GatewayConfig
from tests.support.gateway_process import GatewayProcess
from tests.support.http import connect, read_body, read_head
from tests.support.scripted_engine import ScriptedEngine

COMPLETIONS = "/v1/completions"
KEY = "a-key-of-this-test"
BODY = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
FORM = "multipart/form-data; boundary=x"
USUAL_PROXY_S = 60
"""How long nginx, and the load balancers of large clouds, keep an idle connection by default."""


GATEWAY = {
    "api_key": [KEY],
    "file_store": "files.db",
    "max_body_mib": 1,
    "idle_timeout_s": 1,
}


def head(
    path: str = COMPLETIONS,
    *,
    method: str = "POST",
    version: str = "1.1",
    expects: bool = True,
    **fields: str,
) -> bytes:
    """Return the head of a request with BODY. `fields` are headers, with _ for -."""
    headers = {
        "Host": "localhost",
        "Authorization": f"Bearer {KEY}",
        "Content-Type": "application/json",
        "Content-Length": str(len(BODY)),
        **({"Expect": "100-continue"} if expects else {}),
        **{name.replace("_", "-"): value for name, value in fields.items()},
    }
    lines = [f"{method} {path} HTTP/{version}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest.mark.parametrize(
    ("status", "request_head"),
    [
        (401, head(Authorization="Bearer wrong")),
        (404, head("/v1/nothing")),
        (405, head(method="DELETE")),
        (413, head(Content_Length=str(500 << 20))),
        (415, head(Content_Type="text/plain")),
        (415, head(Content_Encoding="gzip")),
        (413, head("/v1/files", Content_Type=FORM, Content_Length=str(500 << 20))),
    ],
)
def test_a_refused_client_is_not_told_to_send_its_body(
    gateway: GatewayProcess, status: int, request_head: bytes
) -> None:
    with connect(gateway.port) as client, client.makefile("rb") as file:
        client.sendall(request_head)
        found, headers = read_head(file)
        assert found == status, "not 100"
        assert headers["connection"] == "close"
        assert json.loads(read_body(file, headers))["error"]
        assert file.read() == b"", "the connection is closed"


def test_a_client_with_an_accepted_head_is_told_to_send_its_body(gateway: GatewayProcess) -> None:
    with connect(gateway.port) as client, client.makefile("rb") as file:
        for _ in range(2):  # the connection stays open
            client.sendall(head())
            assert read_head(file) == (100, {})
            client.sendall(BODY)
            status, headers = read_head(file)
            assert status == 200
            assert json.loads(read_body(file, headers))["choices"]


@pytest.mark.parametrize(
    "request_head", [head(expects=False), head(version="1.0")], ids=["no Expect", "HTTP/1.0"]
)
def test_a_client_that_does_not_wait_gets_the_answer_alone(
    gateway: GatewayProcess, request_head: bytes
) -> None:
    with connect(gateway.port) as client, client.makefile("rb") as file:
        client.sendall(request_head + BODY)
        assert read_head(file)[0] == 200


def test_an_idle_connection_is_closed_after_the_time_of_the_option(gateway: GatewayProcess) -> None:
    with connect(gateway.port) as client, client.makefile("rb") as file:
        client.sendall(head(expects=False) + BODY)
        status, headers = read_head(file)
        assert status == 200
        read_body(file, headers)
        assert file.read() == b""  # returns when the gateway closes the connection


def test_an_idle_connection_outlasts_those_of_usual_proxies() -> None:
    assert GatewayConfig().idle_timeout_s > USUAL_PROXY_S


def test_a_client_that_closes_its_sending_half_gets_499(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.is_paused = True
    try:
        with connect(gateway.port) as client, client.makefile("rb") as file:
            count = len(engine.generates)
            client.sendall(head(expects=False) + BODY)
            engine.await_generates(count + 1)
            client.shutdown(1)
            assert file.readline().split()[1] == b"499"
    finally:
        engine.is_paused = False
