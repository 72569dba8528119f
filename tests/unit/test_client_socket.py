"""Whether streams are written directly to the client's socket, which depends on TLS and on the
versions of gunicorn and gevent."""

from __future__ import annotations

import re
import socket
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import gevent.socket
import pytest
from gunicorn.config import Config
from gunicorn.workers.ggevent import GeventWorker

from gateway.http.client_socket import (
    can_take_over,
    client_socket,
    describe_writing,
    takeover_obstacle,
)
from tests import oldest

SETUP = (oldest.ROOT / "setup.py").read_text()


def a_worker(worker_class: Any = GeventWorker, **settings: Any) -> SimpleNamespace:
    """Return a gunicorn worker without sockets: its settings and its method
    `is_already_handled`."""
    config = Config()
    for name, value in settings.items():
        config.set(name, value)
    asks = lambda response: worker_class.is_already_handled(None, response)  # noqa: E731
    return SimpleNamespace(cfg=config, is_already_handled=asks)


class NeverHandled(GeventWorker):  # type: ignore[misc]
    def is_already_handled(self, respiter: object) -> bool:
        return False


def test_streams_are_written_directly_with_these_versions() -> None:
    assert takeover_obstacle(a_worker()) is None
    assert describe_writing(None) == "streams: written directly to the client's socket"


def test_streams_over_tls_go_through_wsgi() -> None:
    obstacle = takeover_obstacle(a_worker(certfile="some.pem"))
    assert obstacle == "the connections use TLS"
    line = "streams: written through WSGI, because the connections use TLS"
    assert describe_writing(obstacle) == line


def test_a_gunicorn_that_always_writes_responses_itself_is_an_obstacle() -> None:
    assert "version of gunicorn" in (takeover_obstacle(a_worker(NeverHandled)) or "")


def test_a_gevent_without_plain_sockets_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gevent.socket, "socket", socket.socket)
    assert "version of gevent" in (takeover_obstacle(a_worker()) or "")


@pytest.mark.parametrize(
    ("protocol", "scheme", "is_direct"),
    [("HTTP/1.1", "http", True), ("HTTP/1.0", "http", False), ("HTTP/1.1", "https", False)],
)
def test_only_http_1_1_without_tls_is_taken_over(
    protocol: str, scheme: str, is_direct: bool
) -> None:
    with gevent.socket.socket() as sock:
        environ = {"gunicorn.socket": sock, "SERVER_PROTOCOL": protocol, "wsgi.url_scheme": scheme}
        assert can_take_over(environ) == is_direct
        assert client_socket({**environ, "gunicorn.socket": None}) is None


@pytest.mark.parametrize("library", oldest.LIBRARIES)
def test_the_installed_version_is_an_end_of_the_allowed_range(library: str) -> None:
    """`python -m tests.oldest` runs these tests with the oldest versions. Otherwise, all tests run
    with the newest ones."""
    ends = re.search(rf'"{library}>=([\d.]+),<(\d+)\.(\d+)"', SETUP)
    assert ends, f"setup.py gives no range for {library}"
    lowest, major, minor = ends[1], int(ends[2]), int(ends[3])
    installed = version(library)
    newest = [int(part) for part in installed.split(".")[:2]] == [major, minor - 1]
    assert newest or installed == lowest == oldest.oldest_versions(SETUP)[library]
