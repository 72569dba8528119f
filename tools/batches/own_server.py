"""A server that a command starts for the time of its run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO

from protocol.lifeline import Lifeline
from tools.failure import Failure
from tools.http.web import WebServer, local_url
from tools.processes.children import last_error_line, module_command

POLL_S = 0.2
STOP_S = 60.0


@contextlib.contextmanager
def own_server(arguments: Sequence[str], key: str) -> Iterator[WebServer]:
    """Start `tidegate serve` on a free port, and yield a client of it once it is ready.

    arguments   arguments of `serve`, without --port
    key         API key of the server; "": none

    The server ends with the `with` block, or with this process, however it ends. Raises Failure
    with the server's last error if it does not become ready.
    """
    port = _free_port()
    lifeline = Lifeline()
    command = module_command("tools", "serve", *arguments, "--port", str(port))
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **lifeline.environment},
            process_group=0,
            pass_fds=lifeline.child_ends,
        )
        lifeline.on_started()
        stack.callback(lifeline.close)
        stack.callback(_stop, process)
        server = WebServer(local_url("127.0.0.1", port), key)
        while not ((state := server.readiness()) is not None and state.is_ready):
            if process.poll() is not None:
                raise Failure(_failure(output), exit_code=process.returncode)
            time.sleep(POLL_S)
        yield server


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        process.kill()
    process.wait()


def _failure(output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").splitlines()
    return last_error_line(lines).removeprefix("tidegate: ") or "the server did not start"


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])
