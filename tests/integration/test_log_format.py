"""With `--log-format json` a server prints only JSON lines, including those of gunicorn."""

from __future__ import annotations

import os
from pathlib import Path
from signal import SIGKILL, SIGTERM

import msgspec
import pytest

from protocol.process.exit_codes import ExitCode
from protocol.wire.cluster_key import write_cluster_key
from tests.support.ports import free_port
from tests.support.processes import Program, descendants_of
from tests.support.tiny_checkpoint import write_tiny_llama
from tests.support.waiting import eventually
from tools.models.catalogue import DEFAULT


class LogLine(msgspec.Struct):
    time: str
    level: str
    process: str
    event: str
    message: str = ""


def lines_of(printed: list[str]) -> list[LogLine]:
    """Return the parsed lines. Raises msgspec.MsgspecError if one is not JSON."""
    return [msgspec.json.decode(line, type=LogLine) for line in printed]


def serve(*words: str) -> Program:
    command = ["-P", "-m", "tools", "serve", *words, "--log-format", "json"]
    return Program([*command, "--port", str(free_port()), "--response-store", "none"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def test_all_processes_print_json_from_start_to_end(model: Path) -> None:
    with serve(str(model), "--max-slots", "2") as program:
        program.line_with("Tidegate serves")
        family = descendants_of(program.process.pid)
        gunicorn = [pid for pid, words in family if "gunicorn" in words]  # the master comes first
        os.kill(gunicorn[1], SIGKILL)  # the master logs an error, and starts another
        start = '"message":"serving '  # the worker's warning about its kernels starts so, too
        assert eventually(
            lambda: sum(start in line and '"gateway[' in line for line in program.err) == 2
        )
        program.signal(SIGTERM)
        assert program.end() == ExitCode.OK, program.output
        (banner,) = [line for line in lines_of(program.out) if "Tidegate serves" in line.message]
        assert banner.process == f"tidegate[{program.process.pid}]"
        lines = lines_of(program.err)
        names = {line.process.partition("[")[0] for line in lines}
        assert names == {"gateway", "engine", "worker"}
        (error,) = [line for line in lines if line.event == "gunicorn.error"]
        assert (error.level, error.process) == ("ERROR", f"gateway[{gunicorn[0]}]")


def test_each_gateway_prints_one_line_before_the_banner(model: Path) -> None:
    with serve(str(model), "--max-slots", "2", "--gateways", "2") as program:
        program.line_with("Tidegate serves")
        start = '"message":"serving '  # the worker's warning about its kernels starts so, too
        assert eventually(
            lambda: sum(start in line and '"gateway[' in line for line in program.err) == 2
        )
        lines = [line for line in lines_of([*program.out, *program.err]) if line.event != "request"]
        own = [line for line in lines if line.process.startswith("gateway")]
        assert len(own) == 2, own
        assert all(line.message.startswith("serving ") for line in own)
        assert all("; formats: " in line.message for line in own)
        # Warnings and errors are about this tiny model. Gateways that connect late add lines.
        usual = [line for line in lines if line.level == "INFO"]
        assert len(usual) <= 10, lines


def test_an_engine_alone_logs_no_client_while_its_model_loads(model: Path, tmp_path: Path) -> None:
    key = str(tmp_path / "cluster.key")
    write_cluster_key(key)
    where = ["--role", "decode", "--address", f"tcp://127.0.0.1:{free_port()}"]
    words = ["-P", "-m", "tools", "engine", str(model), *where, "--cluster-key", key]
    with Program([*words, "--max-slots", "2", "--log-format", "json"]) as program:
        program.line_with("This engine serves")
        program.line_with("tidegate engine", on_stderr=True)  # a client, which asked if it is ready
        # A warning is about this tiny model.
        usual = [line for line in lines_of(program.err) if line.level == "INFO"]
        said = [line.message for line in usual if line.process.startswith("engine")]
        assert said[0].startswith("engine ready: ")
        assert any("tidegate engine" in line for line in said[1:]), said


@pytest.mark.parametrize("command", ["serve", "engine"])
def test_the_progress_of_a_download_is_json(command: str, tmp_path: Path) -> None:
    key = str(tmp_path / "cluster.key")
    write_cluster_key(key)
    options = ["--port", str(free_port())]
    if command == "engine":
        where = ["--role", "decode", "--address", f"tcp://127.0.0.1:{free_port()}"]
        options = [*where, "--cluster-key", key]
    environment = {"TIDEGATE_HOME": str(tmp_path / "home"), "PIP_NO_INDEX": "1"}
    words = ["-P", "-m", "tools", command, *options, "--log-format", "json"]
    with Program(words, environment=environment) as program:
        assert program.end() == ExitCode.NO_DOWNLOAD
    progress, error = lines_of(program.err)
    assert progress.message.startswith(f"downloading {DEFAULT}: 0 of ")
    assert (error.level, error.message.partition(":")[0]) == ("ERROR", f"cannot download {DEFAULT}")


def test_a_failed_start_is_logged_as_json(tmp_path: Path) -> None:
    with serve(str(tmp_path / "none")) as program:
        assert program.end() == ExitCode.BAD_MODEL
        (line,) = lines_of(program.err)
        assert line.level == "ERROR"
        assert line.message.startswith("no model")
