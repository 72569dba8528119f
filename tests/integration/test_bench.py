"""`tidegate bench` against a real gateway with a scripted engine, and against servers that fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from protocol.engine.messages import Generate
from tests.support.gateway_process import GatewayProcess
from tests.support.ports import free_port
from tests.support.scripted_engine import ScriptedEngine, TokenReply, text_reply
from tools.__main__ import main

TOKENS = 12
VOCABULARY = "256"
"""The value of `--vocabulary`: token ids below it are bytes in the scripted model."""


def script(generate: Generate) -> TokenReply:
    """Reply with twelve tokens in twelve steps if EOS is ignored, else with five and EOS."""
    return text_reply("abcdefghijkl" if generate.params.ignore_eos else "short")


ENGINE = {"script": lambda generate: script(generate), "step_s": 0.001}
GATEWAY = {"log_requests": False}


def bench(url: str, file: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Run `tidegate bench`. Return its exit code and the JSON that it writes."""
    fixed = ["--output-tokens", str(TOKENS), "--vocabulary", VOCABULARY, "--json", str(file)]
    code = main(["bench", url, *fixed, *options])
    return code, json.loads(file.read_text())


def test_a_curve_of_our_own_server(
    gateway: GatewayProcess,
    engine: ScriptedEngine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = len(engine.generates)
    page = tmp_path / "page.html"
    options = ("--concurrency", "1,4", "--requests", "9", "--input-tokens", "30", "--seed", "5")
    code, result = bench(gateway.url, tmp_path / "bench.json", *options, "--html", str(page))
    assert code == 0
    (loads,) = result["servers"]
    assert [load["load"] for load in loads] == [{"concurrency": 1}, {"concurrency": 4}]
    for load in loads:
        assert (load["requests"], load["completed"], load["errors"]) == (9, 9, {})
        assert (load["input_tokens"], load["output_tokens"]) == (9 * 30, 9 * TOKENS)
        assert (load["events"], load["short_answers"]) == (9 * TOKENS, 0)
        assert load["counted_by"] == {"usage": 9}
        assert load["cached_tokens"] == 9 * 2  # as the scripted engine says
        assert 0 < load["ttft_ms"]["p50"] <= load["e2e_ms"]["p50"]
        assert load["tpot_ms"]["p50"] <= load["e2e_ms"]["p50"] / (TOKENS - 1)
    asked = engine.generates[before:]
    assert len(asked) == 1 + 2 * (2 + 9)  # a probe, and two that warm each load up
    prompts = [tuple(generate.prompt.tolist()) for generate in asked]
    assert len(set(prompts)) == len(prompts)
    out = capsys.readouterr().out
    assert "tokens/s out" in out
    assert "seed 5" in out
    assert page.read_text().count("<svg") == 2


def test_a_chat_under_a_rate_with_objectives(gateway: GatewayProcess, tmp_path: Path) -> None:
    options = ("--api", "chat", "--rate", "100", "--requests", "20", "--warm-up", "0")
    goals = ("--slo-ttft-ms", "0.0001", "--slo-tpot-ms", "5000")
    code, result = bench(gateway.url, tmp_path / "bench.json", *options, *goals)
    assert code == 0
    ((load,),) = result["servers"]
    assert (load["completed"], load["good"]) == (20, 0)
    assert load["load"] == {"rate": 100.0}


def test_a_bench_ends_after_its_duration(gateway: GatewayProcess, tmp_path: Path) -> None:
    options = ("--concurrency", "2", "--duration-s", "0.3")
    code, result = bench(gateway.url, tmp_path / "bench.json", *options)
    ((load,),) = result["servers"]
    assert code == 0
    assert load["duration_s"] >= 0.3
    assert load["completed"] > 2


def test_two_servers_are_compared_load_by_load(
    gateway: GatewayProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--vs", gateway.url, "--concurrency", "1,2", "--requests", "4")
    code, result = bench(gateway.url, tmp_path / "bench.json", *options)
    assert code == 0
    assert [len(loads) for loads in result["servers"]] == [2, 2]
    assert f"{gateway.url} : {gateway.url}" in capsys.readouterr().out


def test_answers_that_end_early_are_reported(
    gateway: GatewayProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--ignore-eos", "no", "--requests", "4", "--concurrency", "2")
    _, result = bench(gateway.url, tmp_path / "bench.json", *options)
    ((load,),) = result["servers"]
    assert load["short_answers"] == 4
    assert "4 answers are shorter than requested" in capsys.readouterr().err


def test_an_unreachable_url_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"http://127.0.0.1:{free_port()}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "no server answers" in line


# ---- servers that fail


class Moody(BaseHTTPRequestHandler):
    """Answers each POST according to `MoodyServer.mood`: with an error status, with an answer that
    breaks off, or with a complete stream."""

    protocol_version = "HTTP/1.1"
    server: MoodyServer

    def do_GET(self) -> None:
        self._say(200, b'{"data": [{"id": "moody"}]}')

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.keys.add(self.headers["Authorization"])
        mood = self.server.mood(asked)
        if mood == "hang up":
            self.close_connection = True
        elif mood.isdigit():
            self._say(int(mood), b'{"error": {"message": "in no mood"}}')
        elif mood == "strict":
            self._say(400, b'{"error": {"message": "unknown field: ignore_eos"}}')
        else:
            chunks = b"".join(b'data: {"choices": [{"text": "%d"}]}\n\n' % n for n in range(3))
            self._say(200, chunks + (b"" if mood == "no end" else b"data: [DONE]\n\n"))

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class MoodyServer(ThreadingHTTPServer):
    moods: list[str]
    is_strict = False
    asked: list[dict[str, Any]]
    keys: set[str | None]

    def mood(self, asked: dict[str, Any]) -> str:
        self.asked.append(asked)
        if self.is_strict and "ignore_eos" in asked:
            return "strict"
        return self.moods.pop(0) if self.moods else "well"


@contextmanager
def moody(*moods: str, is_strict: bool = False) -> Iterator[tuple[str, MoodyServer]]:
    with MoodyServer(("127.0.0.1", 0), Moody) as server:
        server.moods, server.asked, server.is_strict = list(moods), [], is_strict
        server.keys = set()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", server
        finally:
            server.shutdown()
            thread.join()


ONE_BY_ONE = ("--concurrency", "1", "--warm-up", "0", "--requests", "6", "--prompt-as", "words")


def test_errors_are_counted_by_kind_and_end_with_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first is the probe's; a connection that ends unanswered is asked again on a new one.
    moods = ("well", "500", "well", "no end", "500", "hang up", "hang up", "well")
    with moody(*moods) as (url, _):
        code, result = bench(url, tmp_path / "bench.json", *ONE_BY_ONE)
    assert code == 1
    ((load,),) = result["servers"]
    assert load["errors"] == {"status 500": 2, "broken stream": 1, "connection lost": 1}
    assert (load["completed"], load["output_tokens"]) == (2, 6)
    assert load["counted_by"] == {"chunks": 2}
    assert load["resent"] == 1
    err = capsys.readouterr().err
    assert "2 x status 500: in no mood" in err
    assert "their events were counted instead" in err


def test_ignore_eos_is_left_out_for_a_server_that_rejects_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with moody(is_strict=True) as (url, server):
        code, _ = bench(url, tmp_path / "bench.json", *ONE_BY_ONE)
    assert code == 0
    assert ["ignore_eos" in asked for asked in server.asked] == [True] + [False] * 7
    assert all("stream_options" in asked for asked in server.asked)
    assert "does not support ignore_eos" in capsys.readouterr().err


def test_a_server_that_refuses_everything_is_reported_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with moody(*["503"] * 9) as (url, server):
        assert main(["bench", url]) == 1
    assert len(server.asked) == 1
    assert "status 503: in no mood" in capsys.readouterr().err


def test_our_key_is_for_our_server_and_headers_are_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_API_KEY", "secret")
    with moody() as (url, server), moody() as (other_url, other):
        bench(url, tmp_path / "bench.json", *ONE_BY_ONE, "--vs", other_url)
        assert (server.keys, other.keys) == ({"Bearer secret"}, {None})
        header = ("--header", "Authorization: Bearer key")
        bench(other_url, tmp_path / "bench.json", *ONE_BY_ONE, *header)
        assert other.keys == {None, "Bearer key"}


def test_a_connection_that_was_closed_while_idle_is_no_error(tmp_path: Path) -> None:
    """Servers may close an idle connection just when the next request is sent."""
    with moody() as (url, server):
        server.RequestHandlerClass.timeout = 0.01  # type: ignore[attr-defined]
        try:
            code, result = bench(
                url,
                tmp_path / "bench.json",
                *ONE_BY_ONE[:-2],
                "--prompt-as",
                "words",
                "--rate",
                "20",
            )
        finally:
            server.RequestHandlerClass.timeout = None  # type: ignore[attr-defined]
    assert code == 0
    ((load,),) = result["servers"]
    assert (load["completed"], load["errors"]) == (6, {})
