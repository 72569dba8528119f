"""Chat and completion streams that are resumed must have the bytes of uninterrupted streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests

from tests.support.gateway_process import GatewayProcess
from tests.support.http import connect, events_of, exchange, fold_stream, read_head, send_post
from tests.support.scripted_engine import ScriptedEngine, text_reply
from tests.support.waiting import eventually

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEY = {"Authorization": "Bearer k1"}
RESUME = {**KEY, "X-Resume": "1"}
TEXT = "one two three four five six seven eight nine ten"
BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
WINDOW_S = 1.0


ENGINE = {"script": lambda generate: text_reply(TEXT)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("store") / "streams.db")


@pytest.fixture(scope="module")
def gateway(engine: ScriptedEngine, store: str) -> Iterator[GatewayProcess]:
    options: Any = {"response_store": store, "resume_s": WINDOW_S}
    with GatewayProcess(engine=engine.address, **options) as gateway:
        yield gateway.await_ready()


@pytest.fixture(scope="module")
def twin(engine: ScriptedEngine, store: str) -> Iterator[GatewayProcess]:
    options: Any = {"response_store": store, "resume_s": WINDOW_S}
    with GatewayProcess(engine=engine.address, **options) as gateway:
        yield gateway.await_ready()


def without_ids(data: bytes) -> bytes:
    """Return a stream without its event ids."""
    frames = data.split(b"\n\n")
    return b"\n\n".join(f.partition(b"\n")[2] if f.startswith(b"id: ") else f for f in frames)


def picked_up(gateway: GatewayProcess, stream: str, after: int | None = None) -> bytes:
    headers = KEY | ({} if after is None else {"Last-Event-ID": f"{stream}:{after}"})
    answer = requests.get(f"{gateway.url}/v1/streams/{stream}", headers=headers, timeout=20)
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Resume"] == stream
    return answer.content


def cut_after(
    port: int,
    frames: int,
    path: str = CHAT,
    body: Any = BODY,
    on_cut: Callable[[], object] = lambda: None,
) -> tuple[str, bytes]:
    """Read the first frames of a stream and hang up. Return its name and the frames.

    on_cut   called just before the hang-up
    """
    with connect(port) as raw, raw.makefile("rb") as file:
        send_post(raw, path, body, headers=RESUME)
        status, headers = read_head(file)
        assert status == 200
        received = b""
        while received.count(b"\n\n") < frames:
            size = int(file.readline(), 16)
            received += file.read(size)
            file.readline()
        on_cut()
    return headers["x-resume"], received


@pytest.mark.parametrize(("path", "n"), [(CHAT, 1), (CHAT, 3), (COMPLETIONS, 1)])
def test_a_stream_with_event_ids_has_the_same_events(
    gateway: GatewayProcess, path: str, n: int
) -> None:
    asked: dict[str, Any] = {"stream": True, "n": n, "max_tokens": 64}
    asked |= {"prompt": "hi"} if path == COMPLETIONS else {"messages": BODY["messages"]}
    status, headers, data = exchange(gateway.port, path, asked, headers=RESUME)
    assert status == 200
    frames = data.split(b"\n\n")[:-1]
    stream = headers["x-resume"]
    assert [f.partition(b"\n")[0].decode() for f in frames] == [
        f"id: {stream}:{k}" for k in range(len(frames))
    ]
    _, plain_headers, plain = exchange(gateway.port, path, asked, headers=KEY)
    assert "x-resume" not in plain_headers
    assert b"id: " not in plain
    assert fold_stream(events_of(without_ids(data))) == fold_stream(events_of(plain))


def test_a_stream_cut_anywhere_resumes_with_the_same_bytes(
    gateway: GatewayProcess, twin: GatewayProcess
) -> None:
    _, headers, data = exchange(gateway.port, CHAT, BODY, headers=RESUME)
    stream = headers["x-resume"]
    frames = data.split(b"\n\n")
    assert picked_up(gateway, stream) == data
    for after in range(0, len(frames) - 2, 7):
        for where in (gateway, twin):
            assert picked_up(where, stream, after) == b"\n\n".join(frames[after + 1 :])


def test_a_disconnected_client_receives_the_rest(
    engine: ScriptedEngine, gateway: GatewayProcess, twin: GatewayProcess
) -> None:
    engine.step_s = 0.02
    stream, received = cut_after(gateway.port, 8)
    assert len(engine.generates) == 1
    last = received.count(b"\n\n") - 1
    rest = picked_up(twin, stream, last)  # from another process, while it is being made
    whole = picked_up(gateway, stream)
    assert received + rest == whole
    assert fold_stream(events_of(without_ids(whole)))[0]["text"] == TEXT
    assert not engine.aborts.keys() & {generate.request for generate in engine.generates}


def test_resuming_a_stream_sends_no_second_request(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    """Some clients resume by repeating the request with a Last-Event-ID."""
    engine.step_s = 0.02
    stream, received = cut_after(gateway.port, 8)
    last = {**RESUME, "Last-Event-ID": f"{stream}:{received.count(b'id: ') - 1}"}
    _, headers, rest = exchange(gateway.port, CHAT, BODY, headers=last)
    assert headers["x-resume"] == stream
    assert fold_stream(events_of(without_ids(received + rest)))[0]["text"] == TEXT
    assert len(engine.generates) == 1


def test_a_stream_is_resumed_only_by_its_owner(gateway: GatewayProcess) -> None:
    _, headers, _ = exchange(gateway.port, CHAT, BODY, headers=RESUME)
    url = f"{gateway.url}/v1/streams/{headers['x-resume']}"
    for key in ({}, {"Authorization": "Bearer k2"}):
        assert requests.get(url, headers=key, timeout=9).status_code == 404
    wrong = {**KEY, "Last-Event-ID": "stream_x:1"}
    assert requests.get(url, headers=wrong, timeout=9).status_code == 400


def test_a_stream_without_a_client_is_aborted_after_the_window(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.step_s = 0.02
    engine.script = lambda generate: text_reply(TEXT * 50)
    left_at: list[float] = []
    stream, received = cut_after(gateway.port, 4, on_cut=lambda: left_at.append(time.monotonic()))
    aborted_at = engine.await_abort(engine.generates[0].request)
    assert aborted_at - left_at[0] > WINDOW_S * 0.9
    rest = picked_up(gateway, stream, received.count(b"\n\n") - 1)
    assert events_of(without_ids(rest))[-1]["error"]["message"].startswith("the client did not")


def test_a_stream_cannot_be_resumed_after_the_window(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    _, headers, _ = exchange(gateway.port, CHAT, BODY, headers=RESUME)
    url = f"{gateway.url}/v1/streams/{headers['x-resume']}"

    def is_forgotten() -> bool:
        return requests.get(url, headers=KEY, timeout=9).status_code == 404

    # Each question prolongs the window.
    assert eventually(is_forgotten, every_s=WINDOW_S + 0.2)


def test_without_the_header_a_hang_up_aborts_without_waiting_for_the_window(
    engine: ScriptedEngine, store: str
) -> None:
    engine.step_s = 0.02
    with GatewayProcess(engine=engine.address, response_store=store, resume_s=3600) as gateway:
        gateway.await_ready()
        with connect(gateway.port) as raw, raw.makefile("rb") as file:
            send_post(raw, CHAT, BODY)
            read_head(file)
        engine.await_abort(engine.generates[0].request)


def test_a_resumed_stream_ends_with_the_failure(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.step_s = 0.02
    engine.script = lambda generate: text_reply("Hello", finish="error")
    stream, received = cut_after(gateway.port, 2)
    events = events_of(
        without_ids(received + picked_up(gateway, stream, received.count(b"id: ") - 1))
    )
    assert events[-1]["error"]["type"] == "server_error"


def test_a_server_without_resumption_refuses_it(engine: ScriptedEngine) -> None:
    with GatewayProcess(engine=engine.address, response_store="none") as gateway:
        gateway.await_ready()
        answer = gateway.post(CHAT, BODY, headers=RESUME)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Resume")
        assert gateway.post(CHAT, BODY).status_code == 200
