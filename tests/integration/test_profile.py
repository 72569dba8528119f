"""`tidegate profile` on a running server: the trace of the worker, refusals, and clients that give
up."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from protocol.sdk.client import Client
from protocol.wire.errors import InvalidRequest
from tests.support.ports import free_port
from tests.support.server import Server
from tests.support.tiny_checkpoint import write_tiny_llama
from tests.support.waiting import eventually
from tools.__main__ import main

PROMPT = [5, 9, 2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2000)
    with Server("--threads", "1", "--dtype", "float32", model=str(folder)) as server:
        yield server


@contextmanager
def busy(server: Server) -> Iterator[None]:
    """Generate answers during the `with` block, one after another."""
    enough = threading.Event()

    def generate() -> None:
        with Client(server.address) as engine:
            while not enough.is_set():
                engine.generate(PROMPT, max_tokens=100, ignore_eos=True).tokens()

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def test_a_trace_is_written_to_the_directory_and_every_process_is_listed(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "traces"
    with busy(server):
        where = ["--port", str(server.port), "--directory", str(directory)]
        assert main(["profile", *where, "--steps", "20"]) == 0
    out = capsys.readouterr().out
    (file,) = directory.iterdir()
    assert re.match(rf"20 steps in [0-9.]+ s: {re.escape(str(file))}\n", out)
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert any(event["name"] == "aten::linear" for event in events)
    for name in ("supervisor", "gateway", "gateway 1", "engine", "worker 0"):
        assert re.search(rf"^{name} +\d+ +\d\.\d\d$", out, re.MULTILINE), out


def test_one_profile_runs_at_a_time_and_a_client_that_gives_up_ends_its_own(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o700)
    profile = ["profile", "--port", str(server.port), "--directory", str(tmp_path)]
    with (
        Client(server.address) as one,
        Client(server.address) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        # The server is idle, so one client waits in vain, and the other is refused meanwhile.
        requests = [pool.submit(e.profile, 5, str(tmp_path), wait_s=1.0) for e in (one, other)]
        errors = [future.exception() for future in requests]
    assert {type(error) for error in errors} == {TimeoutError, InvalidRequest}
    assert any("another profile" in str(error) for error in errors)

    def gives_up() -> bool:
        assert main([*profile, "--wait-s", "0.1"]) == 1
        return "no profile after 0.1 s" in capsys.readouterr().err

    # The engine may receive a new client's request before it learns that another has given up.
    assert eventually(gives_up)
    with busy(server):
        assert eventually(lambda: main([*profile, "--steps", "3"]) == 0)


def test_a_missing_server_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--port", str(free_port())]) == 1
    assert "no server is running" in capsys.readouterr().err
