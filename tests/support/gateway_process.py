"""A real gateway for tests: gunicorn and its workers as child processes, on a free port."""

from __future__ import annotations

import json
import signal
import subprocess
from functools import cache
from hashlib import sha256
from typing import Any, Self

import requests

from tests.support.ports import free_port
from tests.support.processes import ROOT, Program
from tests.support.scripted_engine import scripted_card
from tests.support.waiting import HANG_S, eventually

CONFIG = ROOT / "gateway" / "gunicorn_conf.py"


@cache
def scripted_digest() -> str:
    """Return the digest of the tokenizer of a ScriptedEngine, as `tidegate serve` remembers it."""
    return sha256(scripted_card().tokenizer).hexdigest()


class GatewayProcess(Program):
    """A gateway that runs until the end of its `with` block. Keyword arguments are fields of
    GatewayConfig, kept as `config`.

    It does not try the tokenizer of a ScriptedEngine in a process of its own. `tidegate serve`
    starts it in the same way from the second time on. It tries every other tokenizer.
    """

    def __init__(self, *, command: list[str] | None = None, **config: Any) -> None:
        self.config = config
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = command or ["-m", "gunicorn", "-c", str(CONFIG), "gateway.app:create_app()"]
        tried = {} if "models" in config else {"tried_tokenizer": scripted_digest()}
        settings = json.dumps({"port": self.port, **tried, **config})
        environment = {"TIDEGATE_GATEWAY": settings, "PYTHONPATH": str(ROOT)}
        super().__init__(["-P", *command], environment=environment)

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.wait()

    def wait(self, timeout_s: float = HANG_S) -> int:
        """Wait for the process to end, and return its exit code. Kill it after the timeout."""
        try:
            return self.end(timeout_s=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.end()
            raise

    @property
    def log(self) -> str:
        """Return everything that the gateway has logged so far."""
        return "\n".join(self.err)

    def await_status(self, path: str, status: int, timeout_s: float = HANG_S) -> requests.Response:
        """Send GET requests until a response has this status. Return that response."""
        last: requests.Response | Exception | None = None

        def is_answered() -> bool:
            nonlocal last
            try:
                last = requests.get(self.url + path, timeout=5)
            except (requests.ConnectionError, requests.Timeout) as error:  # still starting
                last = error
                return self.process.poll() is not None
            return last.status_code == status

        eventually(is_answered, within_s=timeout_s)
        if isinstance(last, requests.Response) and last.status_code == status:
            return last
        body = last.text if isinstance(last, requests.Response) else ""
        raise AssertionError(f"{path} never answered {status}; last: {last} {body}")

    def await_ready(self) -> Self:
        self.await_status("/readyz", 200)
        return self

    def post(self, path: str, body: Any, **options: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=HANG_S, **options)
