"""How commands find the server that their options name, or the only one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools.failure import Failure
from tools.processes import run_lock
from tools.processes.run_lock import LockFacts
from tools.processes.servers import RunningServer, add_server, local_server, running, server_url

Serve = Callable[..., RunningServer]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Hold a run directory as a server does, under a temporary folder of this test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    locks = []

    def start(port: int, url: str = "", model: str = "") -> RunningServer:
        locks.append(run_lock.hold(tmp_path / f"tidegate-{os.getuid()}" / str(port)))
        run_lock.describe(locks[-1], LockFacts(url, model))
        return RunningServer(port, os.getpid(), url or f"http://127.0.0.1:{port}", model)

    yield start
    for lock in locks:
        os.close(lock)


def said(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_server(parser)
    return parser.parse_args(words)


def refusal(*words: str) -> tuple[str, int]:
    with pytest.raises(Failure) as caught:
        local_server(said(*words))
    return str(caught.value), caught.value.exit_code


def test_the_only_server_needs_no_name(serve: Serve) -> None:
    only = serve(8005, "http://10.0.0.7:8005", "small")
    assert running() == [only]
    assert local_server(said()) == only
    assert server_url(said()) == "http://10.0.0.7:8005"


def test_of_several_servers_one_has_to_be_named(serve: Serve) -> None:
    serve(8005, model="small")
    other = serve(8006)
    words, code = refusal()
    assert words == "2 servers are running: 8005 (small), 8006; select one with --port"
    assert code == 2
    with pytest.raises(Failure, match="2 servers are running"):
        server_url(said())
    assert local_server(said("--port", "8006")) == other
    assert local_server(said("--url", "localhost:8006")) == other


def test_a_server_that_does_not_run_is_told_with_those_that_do(serve: Serve) -> None:
    assert refusal() == ("no server is running; start one: tidegate serve", 1)
    assert refusal("--port", "9") == (
        "no server is running on port 9; start one: tidegate serve",
        1,
    )
    serve(8005, model="small")
    assert refusal("--port", "9") == ("no server is running on port 9; running: 8005 (small)", 1)
    far = "https://far.example/v"
    assert refusal("--url", far) == (f"none of your servers on this machine has the URL {far}", 1)


def test_over_http_the_server_may_be_anybodys(serve: Serve) -> None:
    assert server_url(said()) == "http://127.0.0.1:8000"
    serve(8005, "http://[::1]:8005")
    assert server_url(said("--port", "8005")) == "http://[::1]:8005"
    assert server_url(said("--port", "9")) == "http://127.0.0.1:9"
    assert server_url(said("--url", "https://far.example/v")) == "https://far.example/v"


def test_two_names_for_one_server_are_a_usage_error(serve: Serve) -> None:
    for find in (local_server, server_url):
        with pytest.raises(Failure, match="give only one") as caught:
            find(said("--port", "9", "--url", "localhost"))
        assert caught.value.exit_code == 2


def test_a_url_with_a_strange_port_is_a_usage_error(serve: Serve) -> None:
    words, code = refusal("--url", "http://x:y")
    assert words == "--url 'http://x:y': the port must be a number from 0 to 65535"
    assert code == 2


def test_a_lock_keeps_the_last_that_was_said_and_says_nothing_once_free(
    serve: Serve, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    lock = run_lock.hold(directory)
    assert run_lock.facts(directory) == LockFacts()
    for model in ("a-long-name-of-a-model", "b"):
        run_lock.describe(lock, LockFacts("http://h:1", model))
        assert run_lock.facts(directory) == LockFacts("http://h:1", model)
        assert run_lock.holder(directory) == os.getpid()
    os.close(lock)
    assert run_lock.holder(directory) is None
