"""The life of a gateway: before its engine is ready, with other gateways on its port, during a
drain, and after a failure."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import requests
from msgspec.structs import replace

from protocol.engine.stats import WorkerStatus
from protocol.process.exit_codes import ExitCode
from tests.support.gateway_process import GatewayProcess
from tests.support.http import (
    connect,
    error_of,
    events_of,
    exchange,
    fold_stream,
    read_body,
    read_head,
    send_post,
)
from tests.support.scripted_engine import ScriptedEngine, byte_tokenizer, scripted_card, text_reply
from tests.support.waiting import HANG_S, eventually
from tools.http.web import WebServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "a secret question"}]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path / 'engine.sock'}"


def why_not_ready(gateway: GatewayProcess) -> str:
    result: str = requests.get(gateway.url + "/readyz", timeout=5).json()["why"] or ""
    return result


def test_all_routes_return_503_with_retry_after_until_the_engine_is_ready(address: str) -> None:
    with GatewayProcess(engine=address) as gateway:
        gateway.await_status("/livez", 200)
        requests_made = [
            gateway.post(CHAT, {"messages": HI}),
            gateway.post(COMPLETIONS, {"prompt": "x", "stream": True}),
            gateway.post("/tokenize", {"prompt": "x"}),
            requests.get(gateway.url + "/v1/models", timeout=5),
        ]
        for response in requests_made:
            assert response.status_code == 503
            assert response.headers["Retry-After"] == "1"
            assert response.json()["error"]["code"] == "engine_not_ready"
        for path in ("/health", "/readyz"):
            assert requests.get(gateway.url + path, timeout=5).status_code == 503
        assert "tidegate_engine_up 0.0" in requests.get(gateway.url + "/metrics", timeout=5).text
        started = requests.get(gateway.url + "/startupz", timeout=5)
        assert (started.status_code, started.json()["started"]) == (503, False)
        assert "not answered yet" in started.json()["why"]
        with ScriptedEngine(address, welcomes=False) as engine:  # it is there, but still loads
            assert eventually(lambda: "loading" in why_not_ready(gateway))
            response = gateway.post(CHAT, {"messages": HI})
            assert (response.status_code, response.headers["Retry-After"]) == (503, "3")
            assert "the model is loading (3 s so far)" in response.json()["error"]["message"]
            engine.welcomes = True
            facts = gateway.await_status("/readyz", 200).json()
            assert facts["engine"]["epoch"] == engine.epoch
            assert facts["gateway"]["pid"] != gateway.process.pid
            assert gateway.post(CHAT, {"messages": HI}).status_code == 200
        gateway.await_status("/readyz", 503)
        started = requests.get(gateway.url + "/startupz", timeout=5)
        assert (started.status_code, started.json()["started"]) == (200, True)
        alive = requests.get(gateway.url + "/livez", timeout=5).json()
        assert alive["gateway"]["pid"] == facts["gateway"]["pid"]


def test_what_an_engine_tells_of_its_worker_is_told_and_trouble_is_not_ready(address: str) -> None:
    busy = WorkerStatus(
        pid=8, step=3, step_s=9.0, expected_s=8.0, prompt_tokens=700, computed_tokens=256
    )
    with ScriptedEngine(address) as engine, GatewayProcess(engine=address) as gateway:
        gateway.await_ready()
        stats = engine.stats

        def doing() -> str:
            answer = requests.get(gateway.url + "/readyz", timeout=5)
            facts = answer.json()
            assert answer.status_code == (200 if facts["ready"] else 503)
            return f"{facts['ready']} {facts['engine']['doing']}"

        engine.stats = replace(stats, worker=busy)
        wanted = "True computing step 3 for 9.0 s (8.0 s expected): chunk 2 of 3"
        assert eventually(lambda: doing() == wanted)
        engine.stats = replace(stats, worker=replace(busy, trouble="the worker is stuck"))
        assert eventually(lambda: doing() == "False the worker is stuck")
        refused = gateway.post(COMPLETIONS, {"prompt": "x"})
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert "the worker is stuck" in refused.json()["error"]["message"]
        engine.stats = stats
        gateway.await_ready()


def test_a_first_model_that_cannot_be_served_ends_the_gateway(address: str) -> None:
    broken = scripted_card(tokenizer=b"not a tokenizer")
    with (
        ScriptedEngine(address, card=broken),
        GatewayProcess(engine=address, tried_tokenizer="") as gateway,
    ):
        assert gateway.wait(timeout_s=60) == ExitCode.BAD_MODEL
    assert "the gateway cannot start: the model's tokenizer cannot be used" in gateway.log
    assert "Traceback" not in gateway.log


def test_a_tokenizer_is_tried_unless_it_is_the_one_that_was_tried_before(address: str) -> None:
    described = json.loads(byte_tokenizer().to_str())
    described["normalizer"] = {"type": "Prepend", "prepend": "a" * 1_000}  # only a trial refuses it
    card = scripted_card(tokenizer=json.dumps(described).encode())
    tried = {tokenizer: sha256(tokenizer).hexdigest() for tokenizer in (card.tokenizer, b"another")}
    with ScriptedEngine(address, card=card):
        with GatewayProcess(engine=address, tried_tokenizer=tried[card.tokenizer]) as gateway:
            gateway.await_ready()
        with GatewayProcess(engine=address, tried_tokenizer=tried[b"another"]) as gateway:
            assert gateway.wait(timeout_s=60) == ExitCode.BAD_MODEL
    assert "its normalizer can expand one character to more than 64" in gateway.log


def test_a_later_model_that_cannot_be_served_is_not_ready_and_never_500(address: str) -> None:
    broken = scripted_card(tokenizer=b"not a tokenizer")
    with GatewayProcess(engine=address) as gateway:
        with ScriptedEngine(address):
            gateway.await_ready()
        with ScriptedEngine(address, card=broken):
            assert eventually(lambda: "cannot be served: " in gateway.log)
            assert requests.get(gateway.url + "/readyz", timeout=5).status_code == 503
            response = gateway.post(CHAT, {"messages": HI})
            assert "cannot be served" in error_of(response, 503)["message"]
    assert gateway.log.count("cannot be served: ") == 1  # not with every look at it


def test_a_model_without_a_chat_template_still_completes_text(address: str) -> None:
    plain = scripted_card(chat_template=None)
    with ScriptedEngine(address, card=plain), GatewayProcess(engine=address) as gateway:
        gateway.await_ready()
        assert gateway.post(COMPLETIONS, {"prompt": "x"}).status_code == 200
        response = gateway.post(CHAT, {"messages": HI})
        assert error_of(response, 400)["param"] == "messages"


def test_an_unusable_chat_template_is_logged(address: str) -> None:
    broken = scripted_card(chat_template="{% for %}")
    with ScriptedEngine(address, card=broken), GatewayProcess(engine=address) as gateway:
        gateway.await_ready()
        assert gateway.post(COMPLETIONS, {"prompt": "x"}).status_code == 200
        assert gateway.post(CHAT, {"messages": HI}).status_code == 400
    assert "chat requests will be refused: the chat template does not compile" in gateway.log


def test_a_server_is_ready_once_each_of_its_gateways_has_been(address: str) -> None:
    with (
        ScriptedEngine(address, max_clients=1) as engine,
        GatewayProcess(engine=address, gateways=2) as gateway,
    ):
        gateway.await_status("/livez", 200)
        supervisor = WebServer(gateway.url)
        assert eventually(lambda: "1 of 2 gateway processes are ready" in why_not_ready(gateway))
        answers = readiness_by_process(gateway)
        assert [facts["ready"] for facts in answers.values()] == [False, False]
        seen = supervisor.readiness()
        assert seen is not None
        assert not seen.is_ready
        engine.max_clients = 2
        gateway.await_ready()
        assert all(facts["ready"] for facts in readiness_by_process(gateway).values())
        statuses = [gateway.post(COMPLETIONS, {"prompt": "x"}).status_code for _ in range(20)]
        assert statuses == [200] * 20
        dead, other = answers
        os.kill(dead, signal.SIGKILL)  # the engine does not welcome its successor
        answers = readiness_by_process(gateway, without=dead)
        assert answers.pop(other)["ready"], "the start is over"
        (successor,) = answers.values()
        assert not successor["ready"]


def readiness_by_process(
    gateway: GatewayProcess, count: int = 2, without: int = 0
) -> dict[int, dict[str, Any]]:
    """Return the answer of each of `count` processes to GET /readyz, by process id. Each request
    has a connection of its own, so any process may accept it."""
    answers: dict[int, dict[str, Any]] = {}

    def have_answered() -> bool:
        with contextlib.suppress(requests.ConnectionError):  # accepted by the killed process
            facts = requests.get(gateway.url + "/readyz", timeout=5).json()
            if facts["gateway"]["pid"] != without:
                answers[facts["gateway"]["pid"]] = facts
        return len(answers) == count

    assert eventually(have_answered), answers
    return answers


def test_several_gateways_share_a_port_and_count_together(address: str) -> None:
    with ScriptedEngine(address) as engine, GatewayProcess(engine=address, gateways=2) as gateway:
        gateway.await_ready()
        deadline = time.monotonic() + 20
        pids: set[int] = set()
        while len(pids) < 2 and time.monotonic() < deadline:
            facts = requests.get(gateway.url + "/readyz", timeout=5).json()
            if facts["ready"]:
                pids.add(facts["gateway"]["pid"])
        assert len(pids) == 2
        statuses = [gateway.post(COMPLETIONS, {"prompt": "x"}).status_code for _ in range(20)]
        assert statuses == [200] * 20
        metrics = {requests.get(gateway.url + "/metrics", timeout=5).text for _ in range(6)}
        for text in metrics:
            assert 'tidegate_requests_total{route="/v1/completions",status="200"} 20.0' in text
            assert "tidegate_generated_tokens_total 280.0" in text
            assert "tidegate_time_to_first_token_seconds_count 20.0" in text
            assert "tidegate_open_answers 0.0" in text
            alias = 'vllm:generation_tokens_total{model_name="scripted"} 280.0'
            assert alias in text
            assert "tidegate_engine_free_blocks 7.0" in text
            assert 'tidegate_engine_finished_total{reason="stop"} 3.0' in text
        assert len(engine.generates) == 20


def test_a_request_has_one_log_line_without_its_text(address: str) -> None:
    with ScriptedEngine(address) as engine, GatewayProcess(engine=address) as gateway:
        engine.script = lambda generate: text_reply("a secret answer")
        gateway.await_ready()
        body = {"messages": HI, "max_tokens": 5}
        headers = {"X-Request-Id": "abc-1"}
        gateway.post(CHAT, body, headers=headers)
        gateway.post(CHAT, {**body, "stream": True}, headers={"X-Request-Id": "abc-2"})
        forged = gateway.post(CHAT, {**body, "n": 0}, headers={"X-Request-Id": "two words"})
        assert forged.headers["x-request-id"] != "two words"
    lines = [line for line in gateway.log.splitlines() if "POST" in line]
    assert len(lines) == 3
    said = (
        r"POST /v1/chat/completions 200 id=abc-%d prompt_tokens=36 generated_tokens=5 "
        r"finish=length ms=[\d.]+$"
    )
    for number, line in enumerate(lines[:2], 1):
        assert re.search(said % number, line), line
    assert "POST /v1/chat/completions 400 id=" in lines[2]
    assert "secret" not in gateway.log


def test_health_checks_and_scrapes_are_counted_and_not_logged(address: str) -> None:
    probes = ("/livez", "/startupz", "/readyz", "/health", "/metrics")
    with ScriptedEngine(address) as engine, GatewayProcess(engine=engine.address) as gateway:
        gateway.await_ready()
        for method, path in product(("GET", "HEAD", "OPTIONS"), probes):
            assert requests.request(method, gateway.url + path, timeout=5).status_code == 200
        counts = requests.get(gateway.url + "/metrics", timeout=5).text
        assert requests.get(gateway.url + "/version", timeout=5).status_code == 200
        assert eventually(lambda: "GET /version" in gateway.log)
        assert 'tidegate_requests_total{route="/livez",status="200"} 3.0' in counts
        assert not re.search(r" (/livez|/startupz|/readyz|/health|/metrics) ", gateway.log)


def test_a_drain_finishes_streams_and_accepts_nothing_new(address: str) -> None:
    never = 10 * HANG_S
    with (
        ScriptedEngine(address) as engine,
        GatewayProcess(engine=address, drain_s=never) as gateway,
    ):
        gateway.await_ready()
        engine.script = lambda generate: text_reply("z" * 50)
        engine.step_s = 0.03
        with connect(gateway.port) as idle, connect(gateway.port) as client:
            silent = connect(gateway.port)
            with idle.makefile("rb") as file:
                send_post(idle, "/tokenize", {"prompt": "x"})
                read_body(file, read_head(file)[1])
            with client.makefile("rb") as file:
                send_post(client, CHAT, {"messages": HI, "stream": True})
                _, headers = read_head(file)
                gateway.process.send_signal(signal.SIGTERM)
                assert idle.recv(1) == silent.recv(1) == b""
                silent.close()
                choice = fold_stream(events_of(read_body(file, headers)))[0]
                assert (choice["text"], choice["finish"]) == ("z" * 50, ("stop", None))
                assert client.recv(1) == b""
        assert gateway.wait() == 0
        assert "Traceback" not in gateway.log
        assert engine.goodbyes == 1
        with pytest.raises(OSError, match="refused"):
            connect(gateway.port)


def test_a_stream_that_outlasts_the_drain_ends_with_an_error_event(address: str) -> None:
    with ScriptedEngine(address) as engine, GatewayProcess(engine=address, drain_s=0.5) as gateway:
        gateway.await_ready()
        engine.script = lambda generate: text_reply("z" * 4000)
        engine.step_s = 0.05
        bodies: list[bytes] = []
        body = {"messages": HI, "stream": True}
        reader = threading.Thread(
            target=lambda: bodies.append(exchange(gateway.port, CHAT, body)[2])
        )
        reader.start()
        engine.await_generates(1)
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.wait() == 0
        reader.join()
        last: Any = events_of(bodies[0])[-1]
        assert last["error"]["code"] == "draining"
        engine.await_abort(engine.generates[0].request)


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGKILL])
def test_a_stream_whose_server_fails_ends_with_an_error_and_done_long_before_the_drain_would(
    address: str, number: signal.Signals
) -> None:
    """The supervisor sends SIGQUIT after a failure. After SIGKILL, gunicorn's workers notice that
    their master is gone."""
    with ScriptedEngine(address) as engine, GatewayProcess(engine=address, drain_s=600) as gateway:
        gateway.await_ready()
        engine.script = lambda generate: text_reply("z" * 100_000)
        engine.step_s = 0.05
        with connect(gateway.port) as client, client.makefile("rb") as file:
            send_post(client, CHAT, {"messages": HI, "stream": True})
            _, headers = read_head(file)
            engine.await_generates(1)
            gateway.process.send_signal(number)
            body = read_body(file, headers)
        assert body.endswith(b"data: [DONE]\n\n")
        error: Any = events_of(body)[-1]
        assert error["error"]["message"].startswith("the server stops after a failure")
        engine.await_abort(engine.generates[0].request)
        assert gateway.wait() == (0 if number is signal.SIGQUIT else -signal.SIGKILL)


def test_a_gateway_starts_without_the_heavy_libraries(address: str) -> None:
    """The mapped files of the process show what it has loaded."""
    with ScriptedEngine(address) as engine, GatewayProcess(engine=address) as gateway:
        pid = gateway.await_ready().await_status("/readyz", 200).json()["gateway"]["pid"]
        assert gateway.post(CHAT, {"messages": HI}).status_code == 200
        maps = Path(f"/proc/{pid}/maps").read_text()
        status = Path(f"/proc/{pid}/status").read_text()
        resident = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert resident is not None
        print(f"gateway: {int(resident[1]) / 1024:.0f} MiB resident")
        assert "torch" not in maps
        assert "numpy" not in maps
        assert int(resident[1]) < 110 * 1024
        assert len(os.listdir(f"/proc/{pid}/fd")) < 60
        assert engine.generates
