"""Tools that connect to a running engine without HTTP: top, abort and drain. Also replay, which
reads the journal of an engine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from msgspec.structs import replace

from protocol.engine.messages import Pong
from protocol.sdk.client import Client
from tests.support.commands import run_command
from tests.support.gateway_process import GatewayProcess
from tests.support.processes import ROOT, Program
from tests.support.pseudo_terminal import PseudoTerminal
from tests.support.raw_client import RawClient
from tests.support.scripted_engine import ScriptedEngine
from tests.support.tiny_engine import tiny_engine
from tests.support.waiting import eventually

TOOL = [sys.executable, "-P", "-m", "tools"]
REPLAY = ["replay", "--check"]
HI = [{"role": "user", "content": "hi"}]
CONTEXT = 65_536
LONG: dict[str, Any] = {"max_tokens": 60_000, "ignore_eos": True}
"""Options of a request that outlasts any test: its steps take at least half a minute."""


@pytest.fixture
def engine() -> Iterator[tuple[Program, str]]:
    with tiny_engine(context_tokens=CONTEXT) as running:
        yield running


class EngineTools:
    """Runs commands that connect to the engine at `address`."""

    def __init__(self, capfd: pytest.CaptureFixture[str], address: str) -> None:
        self._capfd = capfd
        self._address = address

    def __call__(self, *words: str, code: int = 0) -> str:
        done = run_command(self._capfd, *words, "--engine", self._address)
        assert (done.code, done.err) == (code, ""), done.err
        return done.out


def command(capfd: pytest.CaptureFixture[str], name: str, text: str, address: str) -> str:
    """Return the error of a command whose id is not unique."""
    done = run_command(capfd, name, text, "--engine", address)
    assert (done.code, done.out) == (2, "")
    return done.err


def busy(client: Client, count: int) -> list[object]:
    """Start `count` long requests with the labels "job-0", "job-1", ... Return their answers."""
    return [client.generate([3, 4], labels=[f"job-{i}"], **LONG) for i in range(count)]


def test_requests_are_seen_aborted_and_let_finish(
    engine: tuple[Program, str], capfd: pytest.CaptureFixture[str]
) -> None:
    program, address = engine
    tool = EngineTools(capfd, address)
    with Client(address, name="a program") as client:
        kept = busy(client, 12)
        result = json.loads(tool("top", "--json", "--every-s", "0.1"))
        rows = result["view"]["rows"]
        assert len(rows) == 12
        assert {row["client"] for row in rows} == {"a program"}
        assert [row["name"] for row in rows] == [f"job-{i}" for i in range(12)]
        assert [row["stage"] for row in rows].count("queued") >= 4
        assert result["limits"]["max_slots"] == 8
        text = tool("top", "--once", "--every-s", "0.1")
        assert "slots" in text
        assert "\x1b" not in text
        last = rows[-1]["name"]
        why = tool("why", last)
        assert why.startswith(f"{last}: took ")
        # Why it waits is known after the first step.
        assert eventually(lambda: "for a slot: all 8 were in use" in tool("why", last))
        (timeline,) = json.loads(tool("why", last, "--json"))
        assert [span["stage"] for span in timeline["stages"]][-1] == "queued"
        assert "keeps the last 1,000 requests" in tool("why", "nobody", code=1)
        assert "12 requests have an id like job-" in command(capfd, "why", "job-", address)
        unclear = tool("abort", "job-", code=1)
        assert unclear.startswith("unclear  12 requests have an id like job-: job-0, job-1, ")
        assert "unknown  job:" in tool("abort", "job", code=1), "it is too short"
        assert client.get_status().num_open == 12
        assert "job-11" in tool("why", "job-11…")
        assert tool("abort", "job-10…") == "aborted  job-10\n"
        assert tool("abort", last) == f"aborted  {last}\n"
        assert "aborted: it was aborted by its id" in tool("why", last)
        assert "no open request" in tool("abort", last, code=1)
        assert "aborted  job-" in tool("abort", "--all")
        assert client.get_status().num_open == 0
        assert tool("abort", "--all") == "no open requests\n"
        del kept
        answer = client.generate([3], max_tokens=50, ignore_eos=True)
        assert "draining" in tool("drain", "--wait")
        assert len(answer.tokens()) == 50, "what was open has finished"
    assert program.end() == 0


def test_a_drain_is_reported_to_all_clients_at_once(engine: tuple[Program, str]) -> None:
    program, address = engine
    with RawClient(address) as watcher, Client(address) as client:
        watcher.greet()
        answer = client.generate([3], max_tokens=300, ignore_eos=True)
        client.drain()
        pong = watcher.receive_kind(Pong)
        assert isinstance(pong, Pong)
        assert pong.stats.draining
        assert len(answer.tokens()) == 300
    assert program.end() == 0


def test_a_gateway_before_an_engine_that_drains_is_not_ready(tmp_path: Path) -> None:
    with (
        ScriptedEngine(f"ipc://{tmp_path}/engine") as scripted,
        GatewayProcess(engine=scripted.address) as gateway,
    ):
        gateway.await_ready()
        scripted.stats = replace(scripted.stats, draining=True)
        body = gateway.await_status("/readyz", 503).json()
        assert "accepts no new ones" in body["why"]
        refused = gateway.post("/v1/chat/completions", {"messages": HI})
        assert refused.status_code == 503
        scripted.stats = replace(scripted.stats, draining=False)
        gateway.await_ready()
        assert requests.get(gateway.url + "/livez", timeout=5).ok


def test_top_redraws_a_terminal_until_quit_and_restores_it(engine: tuple[Program, str]) -> None:
    _, address = engine
    terminal = PseudoTerminal([*TOOL, "top", "--engine", address, "--every-s", "60"], 100, 30)
    try:
        assert eventually(lambda: terminal.shows("busy"), within_s=60)
        assert terminal.shows("\x1b[?1049h")
        terminal.resize(50, 20)
        terminal.process.send_signal(signal.SIGWINCH)
        assert eventually(lambda: terminal.shows("promp…"), within_s=60), "drawn anew, to fit"
        terminal.press(b"q")
        assert terminal.process.wait(60) == 0
        assert eventually(lambda: terminal.shows("\x1b[?1049l"))
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["abort"], "give request ids or --all"),
        (["abort", "x", "--all"], "give request ids or --all"),
        (["top", "--every-s", "0"], "--every-s"),
        (["top", "--engine", "tcp://a:5600"], "cluster key"),
        (["top", "--engine", "http://a"], "only ipc"),
    ],
)
def test_an_invalid_command_line_is_reported_in_one_line(
    words: list[str], complaint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    done = run_command(capfd, *words)
    assert done.code == 2
    assert complaint in done.err
    assert done.err.count("\n") == 1


def test_an_unreachable_server_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    done = run_command(capfd, "top", "--port", "8123")
    assert done.code == 1
    assert "no server is running on port 8123" in done.err


def test_a_journal_of_an_engine_that_was_killed_is_replayed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "journals"
    with tiny_engine(journal=str(directory)) as (program, address):
        with Client(address) as client:
            result = [client.generate([3, 4, i], max_tokens=9, temperature=1.0) for i in range(12)]
            assert all([answer.tokens() for answer in result])
            left = client.generate([3], max_tokens=300, ignore_eos=True)
            next(left)
        program.signal(signal.SIGKILL)
        program.end()
    (path,) = directory.iterdir()
    done = run_command(capfd, *REPLAY, str(path))
    assert done.code == 0, done.out + done.err
    assert "13 accepted, 0 refused" in done.out
    assert "all decisions are the same" in done.out
    assert run_command(capfd, *REPLAY, str(ROOT / "README.md")).code == 2
    (directory / "engine-20990101-000000-1-0001.journal").write_text("none")
    whole = run_command(capfd, *REPLAY, str(directory))
    assert whole.code == 2, whole.out + whole.err
    assert "13 accepted, 0 refused" in whole.out
    assert "engine-20990101-000000-1-0001.journal: not a journal: a record of" in whole.err


def test_a_directory_without_a_journal_is_refused(tmp_path: Path) -> None:
    command = [*TOOL, *REPLAY, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == f"tidegate: {tmp_path} contains no journal (*.journal)\n"
