"""`PrivateServer`: a server for one command, which ends with the command.

It is an ordinary `tidegate serve` on a free port of this machine, with an API key that only this
process has. Its output goes to a temporary file, to find the cause in it if the start fails.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Self

from protocol.process.exit_codes import ExitCode
from protocol.process.lifeline import Lifeline
from protocol.shared.api_keys import new_key
from tools.failure import Failure
from tools.http.web import KEY_VARIABLE, WebServer, local_url
from tools.processes.child_environment import child_environment
from tools.processes.children import last_error_line, module_command

HOST = "127.0.0.1"
POLL_S = 0.05
STOP_S = 10.0
"""Seconds that the server has to stop, before it is killed."""
PORT_ATTEMPTS = 3
"""How often a port is chosen. Another program may take it before the server listens."""


class PrivateServer:
    """A server that is ready inside the `with` block, unless the block ends by an exception.

    model       the argument MODEL of `tidegate serve`
    options     more options of `tidegate serve`

    Raises Failure if the server does not start, with its cause and its exit code.
    """

    def __init__(self, model: str, options: Sequence[str] = ()) -> None:
        self._words = ["serve", model, *options]
        self._key = new_key()
        self._lifeline: Lifeline | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.web = WebServer(local_url(HOST, 0))

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as on_failure:  # also Ctrl-C
            on_failure.callback(self._stop)
            for attempt in range(PORT_ATTEMPTS):
                if self._start(is_last=attempt == PORT_ATTEMPTS - 1):
                    break
            on_failure.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def _start(self, *, is_last: bool) -> bool:
        """Start the server and wait until it is ready. Return False if its port was taken."""
        port = _free_port()
        self.web = WebServer(local_url(HOST, port), self._key)
        words = [*self._words, "--host", HOST, "--port", str(port), "--response-store", "none"]
        words += ["--file-store", "none"]
        with tempfile.TemporaryFile() as output:
            self._lifeline = Lifeline()
            self._process = subprocess.Popen(
                module_command("tools", *words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment(self._lifeline.environment, {KEY_VARIABLE: self._key}),
                process_group=0,  # Ctrl-C is handled here
                pass_fds=self._lifeline.child_ends,
            )
            self._lifeline.on_started()
            while self._process.poll() is None:
                readiness = self.web.readiness()
                if readiness is not None and readiness.is_ready:
                    return True
                time.sleep(POLL_S)
            code = self._process.returncode
            self._stop()
            if code == ExitCode.IN_USE and not is_last:
                return False
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
            cause = last_error_line(lines).removeprefix("tidegate: ")
            raise Failure(cause or "the server ended", exit_code=code if code > 0 else 128 - code)

    def _stop(self) -> None:
        """Stop the server if it runs: its request has ended, so it has nothing to finish."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._lifeline is not None:
            with contextlib.suppress(OSError):
                self._lifeline.close()
            self._lifeline = None


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind((HOST, 0))
        port: int = trial.getsockname()[1]
        return port
