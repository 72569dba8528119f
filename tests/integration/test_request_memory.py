"""The memory of a request is free as soon as the request has ended, without garbage collection.

Collection is off in this gateway, so that any object in a reference cycle stays alive. The same
request is sent several times: no type may gain an object for each of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from protocol.engine.encoding import EncodingCard
from protocol.wire.errors import ErrorInfo
from tests.support.batches import batch_line, jsonl
from tests.support.counted_app import BODY_BYTES, OBJECTS
from tests.support.gateway_process import CONFIG, GatewayProcess
from tests.support.http import connect, send_post
from tests.support.scripted_engine import ScriptedEngine, TokenReply, scripted_card
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

NUM_TIMES = 6
APP = "tests.support.counted_app:create_counted_app()"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
OWN = re.compile(
    r"(gateway|protocol|flask|gunicorn)\.|werkzeug\.(?!routing)|gevent\._socket3|_io\."
    r"|builtins\.(frame|traceback|generator|coroutine)$"
)
"""The types of what a request holds. werkzeug's own router leaves a small cycle for each request,
which holds the method and the path."""
KEPT = {"gateway.generation.timeline.Timeline"}
"""Types whose objects are kept on purpose, in bounded number: the recent requests' timelines."""
Send = Callable[[GatewayProcess, ScriptedEngine], None]


ENCODING = EncodingCard(task="embed", max_tokens=64, size=6, pooling="mean", normalizes=True)
ENGINE = {"card": scripted_card(encoding=ENCODING)}


@pytest.fixture(scope="module")
def gateway(
    engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    folder: Path = tmp_path_factory.mktemp("stores")
    command = ["-m", "gunicorn", "-c", str(CONFIG), APP]
    stores = {"response_store": f"{folder}/responses.db", "file_store": f"{folder}/files.db"}
    with GatewayProcess(command=command, engine=engine.address, max_body_mib=1, **stores) as it:
        yield it.await_ready()


def post(path: str, body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Send:
    def send(gateway: GatewayProcess, _engine: ScriptedEngine) -> None:
        answer = gateway.post(path, body, headers=headers)
        assert answer.status_code == status, answer.text

    return send


def ask(method: str, path: str, status: int) -> Send:
    def send(gateway: GatewayProcess, _engine: ScriptedEngine) -> None:
        assert requests.request(method, gateway.url + path, timeout=20).status_code == status

    return send


def chat(status: int = 200, **fields: Any) -> Send:
    return post(CHAT, {"messages": HI, **fields}, status)


def send_and_leave(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Disconnect before the first token."""
    engine.is_paused = True
    before = len(engine.generates)
    with connect(gateway.port) as client:
        send_post(client, CHAT, {"messages": HI, "stream": True, "max_tokens": 100})
        engine.await_generates(before + 1)
    engine.await_abort(engine.generates[before].request)
    engine.is_paused = False


def run_batch(gateway: GatewayProcess, _engine: ScriptedEngine) -> None:
    line = batch_line("a", {"messages": HI}, CHAT)
    url, upload = gateway.url + "/v1", {"file": ("lines.jsonl", jsonl([line]))}
    purpose = {"purpose": "batch"}
    file = requests.post(f"{url}/files", files=upload, data=purpose, timeout=20).json()["id"]
    options = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    batch = gateway.post("/v1/batches", options).json()["id"]

    def done() -> Any:
        found = requests.get(f"{url}/batches/{batch}", timeout=20).json()
        return found if found["status"] == "completed" else None

    output = eventually(done)["output_file_id"]
    content = requests.get(f"{url}/files/{output}/content", timeout=20)
    assert json.loads(content.text)["response"]["status_code"] == 200
    assert requests.delete(f"{url}/files/{file}", timeout=20).status_code == 200


def cut_short(gateway: GatewayProcess, _engine: ScriptedEngine) -> None:
    """Send less of a body than announced."""
    with connect(gateway.port) as client:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{"
        client.sendall(head.encode())


ANSWERED: dict[str, Send] = {
    "a probe": ask("GET", "/livez", 200),
    "no such route": ask("GET", "/nosuch", 404),
    "no such method": ask("DELETE", "/livez", 405),
    "a body that is too large": post(CHAT, {"x": "x" * (2 << 20)}, 413),
    "a large body": chat(x="x" * (1 << 19)),
    "a body without JSON": post(CHAT, "x", 400),
    "a body that is cut short": cut_short,
    "an invalid field": chat(400, n=0),
    "an unknown model": chat(404, model="nosuch"),
    "a chat": chat(),
    "a stream": chat(stream=True),
    "a stream that is resumable": post(
        CHAT, {"messages": HI, "stream": True}, headers={"X-Resume": "1"}
    ),
    "a client that leaves": send_and_leave,
    "a completion": post("/v1/completions", {"prompt": "hi", "n": 2}),
    "a message": post(MESSAGES, {"messages": HI, "max_tokens": 9}),
    "a message's stream": post(MESSAGES, {"messages": HI, "max_tokens": 9, "stream": True}),
    "a message that is invalid": post(MESSAGES, {"messages": [{"role": "user"}]}, 400),
    "a response": post(RESPONSES, {"input": "hi"}),
    "a response's stream": post(RESPONSES, {"input": "hi", "stream": True}),
    "a background response": post(RESPONSES, {"input": "hi", "background": True}),
    "a background stream": post(RESPONSES, {"input": "hi", "background": True, "stream": True}),
    "an Ollama chat": post("/api/chat", {"model": "scripted", "messages": HI}),
    "an Ollama answer": post("/api/chat", {"model": "scripted", "messages": HI, "stream": False}),
    "token ids": post("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}),
    "tokenize": post("/tokenize", {"prompt": "hi"}),
    "embeddings": post("/v1/embeddings", {"input": ["hi", "you"]}),
    "a batch": run_batch,
}
FAILED: dict[str, Send] = {
    "a chat": chat(400),
    "a stream": chat(400, stream=True),
    "a message": post(MESSAGES, {"messages": HI, "max_tokens": 9}, 400),
    "a response": post(RESPONSES, {"input": "hi"}, 400),
    "a background response": post(RESPONSES, {"input": "hi", "background": True}, 400),
    "embeddings": post("/v1/embeddings", {"input": "hi"}, 400),
}


@pytest.mark.parametrize("name", ANSWERED)
def test_no_object_of_a_request_outlives_it(
    gateway: GatewayProcess, engine: ScriptedEngine, name: str
) -> None:
    check_nothing_stays(gateway, engine, ANSWERED[name])


@pytest.mark.parametrize("name", FAILED)
def test_no_object_of_a_refused_request_outlives_it(
    gateway: GatewayProcess, engine: ScriptedEngine, name: str
) -> None:
    refusal = ErrorInfo(code="invalid_request", message="no such grammar", param="grammar")
    engine.script = lambda generate: refusal
    engine.refuses = lambda encode: refusal
    check_nothing_stays(gateway, engine, FAILED[name])


@pytest.mark.parametrize("name", ["a chat", "a stream", "a background response"])
def test_no_object_of_a_failed_answer_outlives_it(
    gateway: GatewayProcess, engine: ScriptedEngine, name: str
) -> None:
    error = ErrorInfo(code="step_failed", message="no memory")
    engine.script = lambda generate: TokenReply([[65]], "error", None, error)
    sends = {**ANSWERED, "a chat": chat(500)}
    check_nothing_stays(gateway, engine, sends[name])


def check_nothing_stays(gateway: GatewayProcess, engine: ScriptedEngine, send: Send) -> None:
    send(gateway, engine)  # fills caches
    counts = alive(gateway)

    def gained() -> dict[str, int]:
        now = alive(gateway)
        more = {kind: now[kind] - counts.get(kind, 0) for kind in now.keys() - KEPT}
        return {kind: count for kind, count in more.items() if count >= NUM_TIMES}

    for _ in range(NUM_TIMES):
        send(gateway, engine)
    assert eventually(lambda: not gained()), gained()


def alive(gateway: GatewayProcess) -> dict[str, int]:
    counts: dict[str, int] = requests.get(gateway.url + OBJECTS, timeout=20).json()
    return {kind: count for kind, count in counts.items() if OWN.match(kind)}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": HI}),
        (CHAT, {"messages": HI, "stream": True}),
        (RESPONSES, {"input": "hi", "background": True}),
    ],
)
def test_a_large_body_counts_until_its_answer_has_ended(
    gateway: GatewayProcess, engine: ScriptedEngine, path: str, fields: dict[str, Any]
) -> None:
    engine.is_paused = True
    body = {**fields, "chat_template_kwargs": {"x": "x" * 700_000}}
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(gateway.post, path, body)
        engine.await_generates(1)
        num_held = num_body_bytes(gateway)
        engine.is_paused = False
        assert num_held > 700_000
        assert sent.result().status_code == 200
    assert eventually(lambda: num_body_bytes(gateway) == 0)


def num_body_bytes(gateway: GatewayProcess) -> int:
    return int(requests.get(gateway.url + BODY_BYTES, timeout=20).json())
