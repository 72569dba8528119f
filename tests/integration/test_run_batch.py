"""`tidegate run-batch` as a process: kills, refusals, lost engines, and a server of its own."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from protocol.engine.messages import Generate
from protocol.wire.errors import ErrorInfo
from tests.support.batches import batch_line, complaints, completion_lines, jsonl, results_in
from tests.support.commands import run_command
from tests.support.gateway_process import GatewayProcess
from tests.support.processes import descendants_of, is_alive
from tests.support.pseudo_terminal import PseudoTerminal
from tests.support.scripted_engine import Reply, ScriptedEngine, ids_of, text_reply
from tests.support.tiny_checkpoint import write_tiny_llama
from tests.support.waiting import eventually
from tests.torture.run_batch import killed_run, num_lines, run_batch


def written(folder: Path, count: int) -> tuple[Path, Path]:
    source = folder / "in.jsonl"
    source.write_text(jsonl(completion_lines(count)))
    return source, folder / "out.jsonl"


def echo(generate: Generate) -> Reply:
    return text_reply(f"answer to {len(generate.prompt.tolist())} tokens", size=9)


def test_a_run_that_is_killed_three_times_answers_each_line_once(
    engine: ScriptedEngine, gateway: GatewayProcess, tmp_path: Path
) -> None:
    engine.script, engine.step_s = echo, 0.005
    found = killed_run(gateway.url, tmp_path, 400, 3)
    assert found.wrong == []
    assert len(found.kills) == 3


def test_failed_lines_are_results_and_give_exit_code_1(
    engine: ScriptedEngine,
    gateway: GatewayProcess,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    engine.script = echo
    lines = [*completion_lines(3), batch_line("bad", {"prompt": 7})]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(jsonl(lines))
    for _ in range(2):  # the second run has nothing left to do
        ran = run_command(capfd, "run-batch", str(source), str(output), "--url", gateway.url)
        assert ran.code == 1, ran.err
        assert "4 lines have results, 1 of them failed" in ran.out
    by_id = {each["custom_id"]: each for each in results_in(output)}
    assert by_id.keys() == {"line-0", "line-1", "line-2", "bad"}
    assert by_id["bad"]["response"]["status_code"] == 400
    assert by_id["bad"]["response"]["body"]["error"]["param"] == "prompt"
    assert by_id["bad"]["error"] is None
    answered = by_id["line-0"]["response"]
    assert answered["status_code"] == 200
    assert answered["body"]["id"] == f"cmpl-{answered['request_id']}"
    assert len(engine.generates) == 3


def test_refused_lines_are_sent_again(
    engine: ScriptedEngine, gateway: GatewayProcess, tmp_path: Path
) -> None:
    refused: set[tuple[int, ...]] = set()

    def refuse_once(generate: Generate) -> Reply:
        prompt = tuple(generate.prompt.tolist())
        if prompt in refused:
            return text_reply("yes")
        refused.add(prompt)
        return ErrorInfo(code="overloaded", message="full", retry_after_s=0.01)

    engine.script = refuse_once
    source, output = written(tmp_path, 5)
    with run_batch(source, output, "--url", gateway.url, "--concurrency", "2") as program:
        assert program.end() == 0, program.output
    assert complaints(completion_lines(5), results_in(output)) == []
    assert len(refused) == 5


def test_a_line_that_ends_the_engine_each_time_fails_and_the_others_do_not(
    engine: ScriptedEngine, gateway: GatewayProcess, tmp_path: Path
) -> None:
    poison = "boom"

    def script(generate: Generate) -> Reply:
        if generate.prompt.tolist() == ids_of(poison):
            return ErrorInfo(code="engine_lost", message="the engine was lost", retry_after_s=0.01)
        return text_reply("fine")

    engine.script = script
    lines = [batch_line(str(n), {"prompt": "hi" if n else poison}) for n in range(3)]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(jsonl(lines))
    with run_batch(source, output, "--url", gateway.url) as program:
        assert program.end() == 1, program.output
    by_id = {each["custom_id"]: each["response"] for each in results_in(output)}
    assert {name: each["status_code"] for name, each in by_id.items()} == {
        "0": 503,
        "1": 200,
        "2": 200,
    }


def test_a_run_gives_up_if_no_line_is_answered_and_can_be_continued(
    engine: ScriptedEngine, gateway: GatewayProcess, tmp_path: Path
) -> None:
    engine.script = lambda generate: ErrorInfo(code="overloaded", message="full")
    source, output = written(tmp_path, 3)
    with run_batch(source, output, "--url", gateway.url, "--give-up-s", "1") as program:
        assert program.end() == 1
        assert "no line was answered for 1 s (the last answer: status 429)" in program.output
    engine.script = echo
    with run_batch(source, output, "--url", gateway.url) as program:
        assert program.end() == 0, program.output
    assert complaints(completion_lines(3), results_in(output)) == []


def test_ctrl_c_ends_a_run_and_aborts_what_it_was_computing(
    engine: ScriptedEngine, gateway: GatewayProcess, tmp_path: Path
) -> None:
    engine.is_paused = True
    source, output = written(tmp_path, 3)
    with run_batch(source, output, "--url", gateway.url) as program:
        engine.await_generates(3)
        program.signal(signal.SIGINT)
        assert program.end() == 128 + signal.SIGINT
        assert "Traceback" not in program.output
    engine.await_idle()
    assert num_lines(output) == 0


def test_a_terminal_shows_a_bar(
    engine: ScriptedEngine, gateway: GatewayProcess, tmp_path: Path
) -> None:
    engine.script = echo
    source, output = written(tmp_path, 20)
    words = ["-P", "-m", "tools", "run-batch", str(source), str(output), "--url", gateway.url]
    shell = ["sh", "-c", 'exec "$0" "$@" 2>&1', sys.executable, *words]  # the bar is on stderr
    with PseudoTerminal(shell) as terminal:
        assert eventually(lambda: terminal.shows("20 lines have results, 0 of them failed"))
    for part in ("20/20", "tokens/s=", "failed=0"):
        assert part in terminal.text


def test_no_server_is_a_failure_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, output = written(tmp_path, 3)
    url = "http://127.0.0.1:1"
    ran = run_command(capfd, "run-batch", str(source), str(output), "--url", url)
    assert ran.code == 1
    assert "no server answers at http://127.0.0.1:1" in ran.err


def test_options_of_a_server_need_a_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["run-batch", *map(str, written(tmp_path, 1))]
    ran = run_command(capfd, *words, "--max-slots", "4")
    assert (ran.code, ran.err.strip()) == (
        2,
        "tidegate: --max-slots needs --model, which starts a server",
    )
    ran = run_command(capfd, *words, "--model", "m", "--port", "8000")
    assert "give only one of --model, --url and --port" in ran.err


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "tiny").mkdir()
    return write_tiny_llama(tmp_path / "tiny")


def own_server_options(model: Path) -> list[str]:
    return ["--model", str(model), "--max-slots", "2", "--threads", "1", "--dtype", "float32"]


def test_a_server_of_its_own_answers_to_every_model_name_and_ends_with_the_run(
    tmp_path: Path, model: Path
) -> None:
    lines = completion_lines(6)
    for number, line in enumerate(lines):
        line["body"]["model"] = f"gpt-{number % 2}"
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(jsonl(lines))
    with run_batch(source, output, *own_server_options(model)) as program:
        assert program.end() == 0, program.output
        assert descendants_of(program.process.pid) == []
    assert complaints(lines, results_in(output)) == []
    models = {each["response"]["body"]["model"] for each in results_in(output)}
    assert models == {"gpt-0", "gpt-1"}


def test_a_server_of_its_own_ends_if_the_run_is_killed(tmp_path: Path, model: Path) -> None:
    source, output = written(tmp_path, 100_000)
    with run_batch(source, output, *own_server_options(model)) as program:
        assert eventually(lambda: num_lines(output) > 5), program.output
        family = [pid for pid, _ in descendants_of(program.process.pid)]
        assert len(family) >= 4
        program.process.kill()
        program.end()
        assert eventually(lambda: not any(map(is_alive, family)))


def test_a_model_that_cannot_be_served_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    words = ["run-batch", *map(str, written(tmp_path, 1))]
    ran = run_command(capfd, *words, "--model", str(tmp_path / "empty"))
    assert ran.code == 5, ran.err
    assert "unheard-of" in ran.err
