"""A server does what its command line says, whatever the environment says to its libraries."""

from __future__ import annotations

from pathlib import Path
from signal import SIGTERM

import psutil
import pytest

from protocol.process.exit_codes import ExitCode
from tests.support.ports import free_port
from tests.support.processes import Program, descendants_of
from tests.support.tiny_checkpoint import write_tiny_llama

THREADS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def listening_of(pid: int) -> set[tuple[str, int]]:
    """Return the addresses at which the descendants of a process listen."""
    processes = [psutil.Process(each) for each, _ in descendants_of(pid)]
    return {
        (each.laddr.ip, each.laddr.port)
        for process in processes
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }


def test_variables_of_libraries_change_nothing_that_options_decide(model: Path) -> None:
    port = free_port()
    environment = {
        "GUNICORN_CMD_ARGS": f"--bind=0.0.0.0:{free_port()} --workers=3",
        "WEB_CONCURRENCY": "auto",
        "FLASK_DEBUG": "1",
        "GEVENT_RESOLVER": "nonsense",
        "PROMETHEUS_MULTIPROC_DIR": "/nonexistent",
        "OMP_THREAD_LIMIT": "1",
        "OMP_NUM_THREADS": "7",
        "PYTHONHASHSEED": "0",
    }
    words = ["serve", str(model), "--port", str(port), "--threads", str(THREADS)]
    words += ["--max-slots", "2", "--response-store", "none", "--file-store", "none"]
    with Program(["-P", "-m", "tools", *words], environment=environment) as program:
        program.line_with("Tidegate serves")
        assert listening_of(program.process.pid) == {("127.0.0.1", port)}
        family = descendants_of(program.process.pid)
        assert sum("gunicorn" in words for _, words in family) == 2, "a master and one process"
        for pid, words_of_child in family:
            got = psutil.Process(pid).environ()
            # The process that decodes images has a number of threads of its own.
            assert not got.items() & environment.items(), words_of_child
        note = program.line_with("ignored variables of the environment")
        assert all(name in note for name in environment)
        program.line_with(f" threads={THREADS} ", on_stderr=True)
        program.signal(SIGTERM)
        assert program.end() == ExitCode.OK, program.output
