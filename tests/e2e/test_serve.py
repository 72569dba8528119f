"""`tidegate serve` and the commands around it: the real model, real processes, real signals."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM

import pytest

from protocol.process.exit_codes import KILLED, ExitCode
from protocol.wire.sockets import run_directory
from tests.support.processes import ROOT, descendants_of, is_alive
from tests.support.prompts import FRUITS, names_a_fruit
from tests.support.server import Server
from tests.support.tiny_checkpoint import write_tiny_llama
from tests.support.waiting import HANG_S, eventually
from tools.chat.session import ChatSession
from tools.http.web import WebServer as Address
from tools.processes.run_lock import METRICS, RUN_KEY

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(model="smollm2-135m") as running:
        yield running


def tidegate(*words: str, said: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "tools", *words]
    return subprocess.run(command, input=said, capture_output=True, text=True, timeout=60)


def conversation(server: Server, **options: object) -> ChatSession:
    address = Address(server.url)
    model = address.first_model()
    assert model is not None
    return ChatSession(address, model, options=dict(options))


def test_the_start_prints_its_phases_and_a_banner(server: Server) -> None:
    result = "\n".join(server.out)
    assert "engine started (pid" in result
    assert f"Tidegate serves smollm2-135m at {server.url}" in result
    assert f"curl {server.url}/v1/chat/completions" in result
    assert f"in a browser: {server.url}/" in result
    assert server.ready_s < 60


def test_at_most_ten_lines_precede_the_banner(server: Server) -> None:
    asked = server.err.index(server.line_with("GET /v1/models 200", on_stderr=True))
    welcome = next(n for n, line in enumerate(server.out) if "Tidegate serves" in line)
    lines = [*filter(None, server.out[:welcome]), *server.err[: asked + 1]]
    lines = [line for line in lines if "environment: OMP_NUM_THREADS;" not in line]  # conftest.py
    assert len(lines) <= 10, server.output
    assert (
        "at most ten lines before the banner" in (ROOT / "docs" / "operate" / "logs.md").read_text()
    )
    pattern = re.compile(r"\d\d:\d\d:\d\d (tidegate|gateway|engine|worker)\[\d+\] INFO .+")
    assert all(map(pattern.fullmatch, lines)), server.output


def test_a_question_on_standard_input_is_answered_on_standard_output(server: Server) -> None:
    ran = tidegate("chat", "--url", server.url, "--temperature", "0", said=FRUITS + "\n")
    assert ran.returncode == 0, ran.stderr
    assert names_a_fruit(ran.stdout)


def test_a_chat_keeps_its_history_until_it_is_reset(server: Server, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    said = f"My name is Ottilie.\n/save {saved}\n/reset\n/save {saved}.2\n/nonsense\n"
    ran = tidegate("chat", "--url", server.url, "--max-tokens", "8", said=said)
    assert ran.returncode == 1  # no /nonsense
    assert "unknown command /nonsense" in ran.stderr
    assert saved.read_text().count('"role"') == 2
    assert Path(f"{saved}.2").read_text().count('"role"') == 0


def test_an_answer_is_counted_and_timed(server: Server) -> None:
    talk = conversation(server, temperature=0, max_tokens=12)
    pieces = list(talk.ask("Count from one to fifty."))
    assert len(pieces) > 1
    assert "".join(piece.text for piece in pieces) == talk.last.text
    assert (talk.last.tokens, talk.last.finish_reason) == (12, "length")
    assert talk.last.tokens_per_s > 0


def test_an_answer_that_is_left_early_stays_in_the_history_as_far_as_it_came(
    server: Server,
) -> None:
    talk = conversation(server, temperature=0)
    answer = talk.ask("Tell me a very long story.")
    first = next(answer).text
    answer.close()
    assert talk.messages[-1]["content"].startswith(first)
    assert eventually(lambda: "running  0 of" in tidegate("status", *port(server)).stdout)


def test_status_shows_a_server_that_is_ready(server: Server) -> None:
    ran = tidegate("status", *port(server))
    assert ran.returncode == 0, ran.stderr
    assert f"pid {server.process.pid}" in ran.stdout
    assert "http     ready" in ran.stdout
    assert "waiting  0" in ran.stdout


def test_a_second_server_on_the_same_port_is_refused_and_shown_the_holder(server: Server) -> None:
    ran = tidegate("serve", *port(server))
    assert ran.returncode == ExitCode.IN_USE
    assert ran.stderr.count("\n") == 1
    assert f"process {server.process.pid}" in ran.stderr


def test_a_refused_request_is_reported_and_not_kept(server: Server) -> None:
    ran = tidegate("chat", "--url", server.url, "--model", "no-such-model", said="hello\n")
    assert ran.returncode == 1
    assert "no-such-model" in ran.stderr


@pytest.mark.parametrize(
    ("victim", "code"),
    [
        ("-m gunicorn", KILLED + SIGKILL),
        ("-m engine_core", KILLED + SIGKILL),
        ("-m worker", ExitCode.WORKER_LOST),
    ],
)
def test_the_death_of_one_process_stops_all_and_is_reported(
    babbling_model: str, victim: str, code: int
) -> None:
    with Server(model=babbling_model) as server:
        family = descendants_of(server.process.pid)
        os.kill(next(pid for pid, words in family if victim in words), SIGKILL)
        assert server.end() == code
        causes = {line for line in server.err if line.startswith("tidegate:")}
        assert causes == {server.err[-1]}, server.output
        name = "gateway" if "gunicorn" in victim else "engine"
        assert server.err[-1].startswith(f"tidegate: {name} ")
        assert eventually(lambda: not any(is_alive(pid) for pid, _ in family)), server.output


@pytest.mark.parametrize("number", [SIGINT, SIGTERM])
def test_a_drain_lets_an_open_stream_finish_and_ends_well(babbling_model: str, number: int) -> None:
    with Server(model=babbling_model) as server:
        family = descendants_of(server.process.pid)
        talk = conversation(server, temperature=0, max_tokens=500, ignore_eos=True)
        answer = talk.ask("Count from one to fifty.")
        next(answer)
        server.signal(number)  # type: ignore[arg-type]
        rest = list(answer)
        assert talk.last.finish_reason == "length", rest
        assert server.end() == 0, server.output
        assert eventually(lambda: not any(is_alive(pid) for pid, _ in family))


def test_a_signal_during_a_download_leaves_no_run_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(HANG_S)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/model.gguf#sha256={'0' * 64}"
        server = Server(model=url)
        connection, _ = silent.accept()
        with connection:
            assert run_directory(server.port).exists()
            server.signal(SIGTERM)
            assert server.end() == 128 + SIGTERM, server.output
    assert server.err[-1] == "tidegate: stopped by SIGTERM before the model was loaded"
    assert not run_directory(server.port).exists()


def test_a_drain_by_another_client_ends_the_server_and_is_logged(tmp_path: Path) -> None:
    model = str(write_tiny_llama(tmp_path))
    with Server("--max-slots", "2", "--gateways", "2", model=model) as server:
        assert (run_directory(server.port) / METRICS).is_dir()
        drain = tidegate("drain", *port(server))
        assert drain.returncode == 0, drain
        assert server.end() == ExitCode.OK, server.output
    server.line_with("INFO engine drained, at the request of client 'drain'; the server stops")
    assert not [line for line in server.err if line.startswith(("tidegate:", "Traceback"))]
    assert not run_directory(server.port).exists(), "a clean stop leaves nothing"


def test_a_server_that_was_killed_with_all_its_processes_leaves_nothing_to_the_next_start(
    tmp_path: Path,
) -> None:
    model = str(write_tiny_llama(tmp_path))
    with Server("--split", model=model) as server:
        # First the supervisor, which would otherwise clean up after the death of the others.
        for pid, _ in [(server.process.pid, ""), *descendants_of(server.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGKILL)
        server.end()
    left = run_directory(server.port)
    assert (left / RUN_KEY).exists()
    with Server(model=model) as another:
        assert not left.exists()
        another.signal(SIGTERM)
        assert another.end() == ExitCode.OK
    assert not run_directory(another.port).exists()


def test_a_folder_of_the_users_that_is_called_worker_does_no_harm(
    babbling_model: str, tmp_path: Path
) -> None:
    for room in ("protocol", "gateway", "engine_core", "worker", "tools", "simulator"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("raise SystemExit('the wrong room')")
    with Server(model=babbling_model, cwd=tmp_path) as server:
        assert list(conversation(server, temperature=0, max_tokens=4).ask(FRUITS))


def port(server: Server) -> list[str]:
    return ["--port", str(server.port)]
