"""A real gateway for tests: gunicorn and its workers as child processes, on a free port."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any, Self

import requests

from tests.support.processes import ROOT, Program, free_port
from tests.support.waiting import HANG_S, eventually

CONFIG = ROOT / "gateway" / "gunicorn_conf.py"


class GatewayProcess(Program):
    """`with GatewayProcess(engine=address, ...)`: config fields by name. `log` is what it wrote."""

    def __init__(self, *, command: list[str] | None = None, **config: Any) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = command or ["-m", "gunicorn", "-c", str(CONFIG), "gateway.app:create_app()"]
        told = json.dumps({"port": self.port, **config})
        environment = {"TIDEGATE_GATEWAY": told, "PYTHONPATH": str(ROOT)}
        super().__init__(["-P", *command], environment=environment)

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.wait()

    def wait(self, timeout_s: float = HANG_S) -> int:
        """Until it has ended; its exit code."""
        try:
            return self.end(timeout_s=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.end()
            raise

    @property
    def log(self) -> str:
        """So far; all of it after the end."""
        return "\n".join(self.err)

    def await_status(self, path: str, status: int, timeout_s: float = HANG_S) -> requests.Response:
        """Ask until the answer has this status."""
        last: requests.Response | Exception | None = None

        def is_answered() -> bool:
            nonlocal last
            try:
                last = requests.get(self.url + path, timeout=5)
            except (requests.ConnectionError, requests.Timeout) as error:  # it still starts
                last = error
                return self.process.poll() is not None
            return last.status_code == status

        eventually(is_answered, within_s=timeout_s)
        if isinstance(last, requests.Response) and last.status_code == status:
            return last
        told = last.text if isinstance(last, requests.Response) else ""
        raise AssertionError(f"{path} never answered {status}; last: {last} {told}")

    def await_ready(self) -> Self:
        self.await_status("/readyz", 200)
        return self

    def post(self, path: str, body: Any, **options: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=20, **options)
