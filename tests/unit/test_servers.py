"""How commands find a server, what they print about it, and how they send it requests."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protocol.process.devices import DeviceHolder
from tools.chat.session import ChatAnswer, events
from tools.commands.ps import ProcessUsage, duration, format_found
from tools.commands.stop import select, signal_targets
from tools.failure import Failure
from tools.http.web import WebServer, local_url
from tools.processes import run_lock
from tools.processes.discovery import (
    Found,
    RunDirectory,
    RunningProcess,
    RunningServer,
    add_server,
    discover,
    local_server,
    running,
    server_url,
)
from tools.processes.run_lock import LockFacts

Serve = Callable[..., RunningServer]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Return a function that holds the run directory of a port, as a server does, and returns the
    `RunningServer`. The directories are in the test's temporary folder, and are released at the end
    of the test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    locks = []

    def start(port: int, url: str = "", model: str = "") -> RunningServer:
        locks.append(run_lock.hold(tmp_path / f"tidegate-{os.getuid()}" / str(port)))
        run_lock.describe(locks[-1], LockFacts(url, model))
        return RunningServer(port, os.getpid(), url or f"http://127.0.0.1:{port}", model)

    yield start
    for lock in locks:
        os.close(lock)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_server(parser)
    return parser.parse_args(words)


def refusal(*words: str) -> tuple[str, int]:
    with pytest.raises(Failure) as caught:
        local_server(options(*words))
    return str(caught.value), caught.value.exit_code


def test_the_only_server_needs_no_name(serve: Serve) -> None:
    only = serve(8005, "http://10.0.0.7:8005", "small")
    assert running() == [only]
    assert local_server(options()) == only
    assert server_url(options()) == "http://10.0.0.7:8005"


def test_one_of_several_servers_must_be_named(serve: Serve) -> None:
    serve(8005, model="small")
    other = serve(8006)
    words, code = refusal()
    assert words == "2 servers are running: 8005 (small), 8006; select one with --port"
    assert code == 2
    with pytest.raises(Failure, match="2 servers are running"):
        server_url(options())
    assert local_server(options("--port", "8006")) == other
    assert local_server(options("--url", "localhost:8006")) == other


def test_a_missing_server_is_reported_with_the_running_ones(serve: Serve) -> None:
    assert refusal() == ("no server is running; start one: tidegate serve", 1)
    assert refusal("--port", "9") == (
        "no server is running on port 9; start one: tidegate serve",
        1,
    )
    serve(8005, model="small")
    assert refusal("--port", "9") == ("no server is running on port 9; running: 8005 (small)", 1)
    far = "https://far.example/v"
    assert refusal("--url", far) == (f"none of your servers on this machine has the URL {far}", 1)


def test_a_url_may_name_a_server_elsewhere(serve: Serve) -> None:
    assert server_url(options()) == "http://127.0.0.1:8000"
    serve(8005, "http://[::1]:8005")
    assert server_url(options("--port", "8005")) == "http://[::1]:8005"
    assert server_url(options("--port", "9")) == "http://127.0.0.1:9"
    assert server_url(options("--url", "https://far.example/v")) == "https://far.example/v"


def test_two_names_for_one_server_are_a_usage_error(serve: Serve) -> None:
    for find in (local_server, server_url):
        with pytest.raises(Failure, match="give only one") as caught:
            find(options("--port", "9", "--url", "localhost"))
        assert caught.value.exit_code == 2


def test_a_url_with_a_strange_port_is_a_usage_error(serve: Serve) -> None:
    words, code = refusal("--url", "http://x:y")
    assert words == "--url 'http://x:y': the port must be a number from 0 to 65535"
    assert code == 2


def test_a_lock_holds_the_last_facts_until_it_is_free(serve: Serve, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    lock = run_lock.hold(directory)
    assert run_lock.facts(directory) == LockFacts()
    for model in ("a-long-name-of-a-model", "b"):
        run_lock.describe(lock, LockFacts("http://h:1", model))
        assert run_lock.facts(directory) == LockFacts("http://h:1", model)
        assert run_lock.holder(directory) == os.getpid()
    os.close(lock)
    assert run_lock.holder(directory) is None


# ---- tidegate ps
SUPERVISOR, ENGINE = RunningProcess(10, 1, 5, "tools"), RunningProcess(11, 10, 6, "engine_core")


def place(**fields) -> RunDirectory:
    more = {"name": "8000", "pid": 10, "is_supervised": True, "processes": [SUPERVISOR, ENGINE]}
    return RunDirectory(**{**more, "sockets": ["engine.sock"], **fields})


def test_ps_shows_each_state_of_a_server() -> None:
    named = place(name="7000", url="http://127.0.0.1:7000", model="small")
    lost = place(name="8001", is_supervised=False, processes=[ENGINE])
    stale = place(name="engine-ab", pid=None, is_supervised=False, processes=[])
    free = place(name="8002", pid=None, is_supervised=False, processes=[], sockets=[])
    usages = {
        "7000": ProcessUsage(3725.0, 3 << 29),
        "8000": ProcessUsage(5.2),
        "8001": ProcessUsage(),
    }
    holder = DeviceHolder(pid=13, place="engine-cd", model="small", since=1.7e9, shares=True)
    strays, devices = [RunningProcess(12, 1, 7, "worker")], {"gpu-0a1b": [holder]}
    found = Found([named, place(), lost, stale, free], strays, devices)
    text = format_found(found, usages | {"engine-ab": ProcessUsage()})
    assert text.splitlines() == [
        "port     7000: serves small at http://127.0.0.1:7000 (pid 10), up 1 h 2 min, 1.50 GiB",
        "         tools (pid 10)",
        "         engine_core (pid 11)",
        "port     8000: serves (pid 10), up 5 s",
        "         tools (pid 10)",
        "         engine_core (pid 11)",
        "port     8001: lost its supervisor (pid 10)",
        "         engine_core (pid 11)",
        "engine   engine-ab: left behind",
        "         sockets without a process: engine.sock",
        "stray    worker (pid 12) belongs to no server; to end it: kill 12",
        "device   gpu-0a1b: pid 13 (small as engine-cd, since 2023-11-14 22:13:20 UTC, shared)",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (61, "1 min 1 s"), (86400, "1 d"), (90061, "1 d 1 h")]
)
def test_a_time_span_is_shown_in_its_two_largest_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_stop_signals_the_supervisor_or_its_orphans() -> None:
    assert signal_targets(place(), kill=False) == [SUPERVISOR]
    assert signal_targets(place(), kill=True) == [SUPERVISOR, ENGINE]
    assert signal_targets(place(is_supervised=False, processes=[ENGINE]), kill=False) == [ENGINE]
    one, other = place(), place(name="8001")
    assert select(Found([one, other], []), ["8001", "8001"]) == [other]
    assert select(Found([one, other], []), []) == [one, other]


def test_strays_are_our_processes_whose_parent_is_gone(tmp_path: Path) -> None:
    for pid, parent, state, words in [
        (7, 1, "S", "python\0-m\0worker\0"),
        (8, 1, "Z", "python\0-m\0worker\0"),
        (9, 6, "S", "python\0-m\0engine_core\0"),
        (10, 1, "S", "sshd\0"),
    ]:
        folder = tmp_path / "proc" / str(pid)
        folder.mkdir(parents=True)
        rest = " ".join(["0"] * 17 + [str(pid * 100)])
        (folder / "stat").write_text(f"{pid} (a (b) c) {state} {parent} {rest}")
        (folder / "cmdline").write_bytes(words.encode())
    found = discover(tmp_path / "none", tmp_path / "proc")
    assert found == Found([], [RunningProcess(7, 1, 700, "worker")])
    assert os.getuid() == (tmp_path / "proc").stat().st_uid


# ---- tidegate chat
def test_events_are_the_data_up_to_done_without_comments() -> None:
    lines = [
        b": alive\n",
        b"\n",
        b'data: {"a": 1}\r\n',
        b"\n",
        b"data:2\n",
        b"\n",
        b"data: [DONE]\n",
        b"\n",
        b"data: 3\n",
        b"\n",
    ]
    assert list(events(lines)) == ['{"a": 1}', "2"]


def test_a_stream_that_ends_without_done_is_not_taken_for_an_answer() -> None:
    stream = events([b"data: 1\n", b"\n"])
    assert next(stream) == "1"
    with pytest.raises(Failure, match="closed the stream without"):
        next(stream)


def test_the_chat_speed_is_that_of_decoding() -> None:
    assert ChatAnswer(tokens=11, started_at=1.0, ended_at=3.0).tokens_per_s == 5.0
    assert ChatAnswer(tokens=1, started_at=1.0, ended_at=1.0).tokens_per_s == 0.0


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("gpu-1", "http://gpu-1:8000"),
    ],
)
def test_a_server_on_all_interfaces_is_reached_on_loopback(host: str, url: str) -> None:
    assert local_url(host, 8000) == url


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port"])
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(Failure, match="--url"):
        WebServer(url)
