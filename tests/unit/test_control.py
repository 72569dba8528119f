"""The control protocol: golden lines of every message, framing, and refusals.

After an intended change of the format, write the golden lines anew with `python -m
tests.unit.test_control` and review the difference.
"""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from protocol.config.gateway import ModelConfig
from protocol.tools import control
from protocol.tools.control import (
    MAX_LINE_BYTES,
    ControlError,
    ControlMessage,
    ControlReader,
    CopyModel,
    DeleteModel,
    DownloadableModel,
    FromSupervisor,
    GetLibrary,
    GetModels,
    ModelLibrary,
    ModelState,
    ModelStates,
    PullEnded,
    PullModel,
    PullProgress,
    ReportUse,
    RollEnded,
    RollEngines,
    RollProgress,
    StartModel,
    StopModel,
    ToSupervisor,
)
from protocol.wire.errors import ErrorInfo, WireError
from tools.failure import Failure
from tools.processes.control_client import ControlClient

GOLDEN = Path(__file__).parents[1] / "data" / "control.jsonl"
REQUESTS: tuple[ControlMessage, ...] = (
    StartModel(model="small"),
    StopModel(model="small"),
    ReportUse(open={"small": 2, "große": 0}, kept={"large": 1}, version=7),
    GetModels(),
    RollEngines(),
    PullModel(model="owner/repo:Q4_0"),
    CopyModel(source="small", destination="gpt"),
    DeleteModel(model="gpt"),
    GetLibrary(),
)
REPLIES: tuple[ControlMessage, ...] = (
    ModelStates(
        version=7,
        models=[
            ModelState(name="small", state="ready", version=6, planned_bytes=5 << 30),
            ModelState(name="large", state="failed", error="out of memory", planned_bytes=9 << 30),
            ModelState(name="third", state="waiting", waits_for=["small"]),
        ],
        used_bytes=5 << 30,
        limit_bytes=16 << 30,
    ),
    ControlError(message="model large needs 9 GiB", model="large"),
    RollProgress(engine="engine 2", stage="ready", number=2, total=3),
    RollEnded(error="engine 2 is not ready after 600 s"),
    ModelStates(
        version=8,
        models=[],
        hosted=[ModelConfig(served_name=["gpt"], key="small", engine="ipc:///run/engine-1.sock")],
    ),
    ControlError(message="model: ...", code="invalid_request", param="model"),
    PullProgress(model="gpt", status="pulling 8e", digest="sha256:8e", total=9, completed=7),
    PullEnded(model="gpt", error=ErrorInfo(code="disk_full", message="9 GB needed, 1 GB free")),
    ModelLibrary(
        models=[
            DownloadableModel(name="small", download_bytes=7, weights_bytes=9, is_gated=True),
            DownloadableModel(
                name="gpt", pull=PullProgress(model="gpt", status="pulling manifest")
            ),
        ],
        disk_free_bytes=1 << 30,
    ),
)


def lines() -> bytes:
    return b"".join(control.encode(message) for message in (*REQUESTS, *REPLIES))


def test_every_kind_of_message_has_a_sample() -> None:
    assert {type(each) for each in REQUESTS} == set(get_args(ToSupervisor))
    assert {type(each) for each in REPLIES} == set(get_args(FromSupervisor))


def test_the_bytes_of_the_messages_do_not_change() -> None:
    assert lines() == GOLDEN.read_bytes()


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_messages_arrive_whole_however_the_stream_is_cut(size: int) -> None:
    for kind, sent in ((ToSupervisor, REQUESTS), (FromSupervisor, REPLIES)):
        data = b"".join(map(control.encode, sent))
        reader: ControlReader[ControlMessage] = ControlReader(kind)
        cuts = [data[start : start + size] for start in range(0, len(data), size)]
        assert [message for cut in cuts for message in reader.push(cut)] == list(sent)


@pytest.mark.parametrize("message", REPLIES, ids=lambda each: type(each).__name__)
def test_the_supervisor_refuses_a_message_of_the_other_direction(message: ControlMessage) -> None:
    reader: ControlReader[ControlMessage] = ControlReader(ToSupervisor)
    with pytest.raises(WireError, match="malformed"):
        reader.push(control.encode(message))


@pytest.mark.parametrize(
    "line", [b"\n", b"{}\n", b"[1]\n", b"\xff\n", b'{"kind":"startmodel","model":1}\n']
)
def test_a_malformed_line_is_a_wire_error(line: bytes) -> None:
    with pytest.raises(WireError, match="malformed"):
        ControlReader[ControlMessage](ToSupervisor).push(line)


def test_an_endless_line_is_refused() -> None:
    reader: ControlReader[ControlMessage] = ControlReader(ToSupervisor)
    half = b"a" * (MAX_LINE_BYTES // 2)
    assert reader.push(half) == reader.push(half) == []
    with pytest.raises(WireError, match="exceeds"):
        reader.push(b"a")


def test_fields_of_a_newer_version_are_ignored() -> None:
    reader: ControlReader[ControlMessage] = ControlReader(ToSupervisor)
    line = b'{"kind":"startmodel","model":"small","new":[1]}\n'
    assert reader.push(line) == [StartModel(model="small")]


@pytest.fixture
def directory() -> Iterator[Path]:
    with (
        tempfile.TemporaryDirectory() as name
    ):  # a short path: tmp_path may exceed a socket's limit
        yield Path(name)


def test_a_command_receives_the_replies_to_its_request_in_order(directory: Path) -> None:
    replies = [
        RollProgress(engine="engine 1", stage="ready", number=1, total=1),
        RollEnded(),
        ControlError(message="no model has this name", model="x"),
    ]
    received: list[ToSupervisor] = []

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            received.extend(ControlReader[ToSupervisor](ToSupervisor).push(connection.recv(1000)))
            connection.sendall(b"".join(map(control.encode, replies)))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(control.control_address(directory))
        listener.listen()
        thread = threading.Thread(target=answer)
        thread.start()
        with ControlClient(directory) as client:
            assert client.send(RollEngines()) == replies[0]
            assert client.receive() == replies[1]
            with pytest.raises(Failure, match="no model has this name"):
                client.receive()
            with pytest.raises(Failure, match="closed the connection"):
                client.receive()
        thread.join()
    assert received == [RollEngines()]


def test_a_server_without_a_supervisor_is_a_failure_and_not_an_exception(directory: Path) -> None:
    with pytest.raises(Failure, match="the supervisor cannot be reached"):
        ControlClient(directory)


if __name__ == "__main__":
    GOLDEN.write_bytes(lines())
