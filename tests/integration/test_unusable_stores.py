"""A server whose stores cannot be written: it says so at the start, and requests that need them get
503 with the cause."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from gateway.store.sqlite_file import write_obstacle
from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import eventually

STORES = {"--response-store": "responses/8000.db", "--file-store": "files/8000.db"}
JSONL = {"file": ("a.jsonl", b"{}\n")}
FILES, BATCHES, RESPONSES = "/v1/files", "/v1/batches", "/v1/responses"
BATCH = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}


@pytest.fixture(scope="module")
def occupied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path at which no directory can be made, by any user."""
    path = tmp_path_factory.mktemp("home") / "tidegate"
    path.write_text("a file")
    return path


@pytest.fixture(scope="module")
def gateway(engine: ScriptedEngine, occupied: Path) -> Iterator[GatewayProcess]:
    responses, files = (str(occupied / name) for name in STORES.values())
    with GatewayProcess(
        engine=engine.address, response_store=responses, file_store=files
    ) as gateway:
        yield gateway.await_ready()


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A file system that is mounted read-only."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def warnings(gateway: GatewayProcess) -> list[str]:
    return [line for line in gateway.err if "cannot write" in line]


def test_one_line_at_the_start_names_each_store_its_option_and_the_cause(
    gateway: GatewayProcess, occupied: Path
) -> None:
    assert eventually(lambda: warnings(gateway))
    (line,) = warnings(gateway)
    assert "WARNING" in line
    for option, name in STORES.items():
        assert f"{option} {occupied / name} ({occupied} is not a directory)" in line


@pytest.mark.parametrize(
    ("method", "path", "options"),
    [
        ("POST", FILES, {"files": JSONL, "data": {"purpose": "batch"}}),
        ("GET", FILES, {}),
        ("GET", f"{FILES}/file-1", {}),
        ("GET", f"{FILES}/file-1/content", {}),
        ("DELETE", f"{FILES}/file-1", {}),
        ("POST", BATCHES, {"json": BATCH}),
        ("GET", BATCHES, {}),
        ("GET", f"{BATCHES}/batch_1", {}),
        ("POST", f"{BATCHES}/batch_1/cancel", {}),
        ("POST", RESPONSES, {"json": {"input": "hi", "background": True}}),
        ("POST", RESPONSES, {"json": {"input": "hi", "previous_response_id": "resp_1"}}),
        ("GET", f"{RESPONSES}/resp_1", {}),
        ("GET", f"{RESPONSES}/resp_1?stream=true", {}),
        ("GET", f"{RESPONSES}/resp_1/input_items", {}),
        ("POST", f"{RESPONSES}/resp_1/cancel", {}),
        ("DELETE", f"{RESPONSES}/resp_1", {}),
    ],
)
def test_a_request_that_needs_a_store_gets_503_with_the_cause(
    gateway: GatewayProcess, occupied: Path, method: str, path: str, options: Any
) -> None:
    answer = requests.request(method, gateway.url + path, timeout=20, **options)
    option = "--response-store" if path.startswith(RESPONSES) else "--file-store"
    error = answer.json()["error"]
    assert answer.status_code == 503, error
    assert error["code"] == "store_unusable"
    assert "cannot be used: " in error["message"]
    assert option in error["message"]
    assert str(occupied) not in answer.text, "clients do not see paths"
    assert int(answer.headers["Retry-After"]) >= 1


def test_a_response_is_sent_although_it_cannot_be_stored(gateway: GatewayProcess) -> None:
    answer = gateway.post(RESPONSES, {"input": "hi"})
    assert answer.status_code == 200
    assert answer.json()["store"] is False
    assert not any("Traceback" in line for line in gateway.err)


def test_a_store_that_can_be_used_again_is_used(engine: ScriptedEngine, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.write_text("a file")
    with GatewayProcess(engine=engine.address, file_store=str(folder / "f.db")) as gateway:
        gateway.await_ready()
        assert requests.get(gateway.url + FILES, timeout=20).status_code == 503
        folder.unlink()
        assert requests.get(gateway.url + FILES, timeout=20).status_code == 200


def test_the_cause_is_known_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "c.db"
    assert write_obstacle(str(path)) == ""
    assert not (tmp_path / "a").exists()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    assert write_obstacle(str(path)) == ""


def test_a_read_only_file_system_is_named(read_only: Path) -> None:
    for name in STORES.values():
        assert write_obstacle(str(read_only / name)) == "read-only file system"
