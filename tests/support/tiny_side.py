"""One engine of a prefill/decode pair with a tiny model, as a process of its own."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from protocol.sdk.client import Client
from tests.support.processes import Program, descendants_of

START_S = 60.0


class TinySide(Program):
    """A `python -m engine_core` process. Call `await_ready` before use.

    directory        folder of its sockets and of the cluster key, "key"
    name             name of its socket; by default its role
    worker, engine   further fields of their configs
    """

    def __init__(
        self,
        directory: Path,
        checkpoint: Path,
        role: str,
        *,
        worker: dict[str, Any],
        name: str = "",
        **engine: Any,
    ) -> None:
        self.address = f"ipc://{directory}/{name or role}.sock"
        exports = role == "prefill"
        key = str(directory / "key")
        model = {"model": str(checkpoint), "dtype": "float32", "threads": 1, "poison_slots": "wild"}
        exchange = {"kv_export": exports, "kv_address": self.address + ".kv" if exports else ""}
        config = {
            "address": self.address,
            "role": role,
            "cluster_key": key,
            "worker": {**model, **exchange, "cluster_key": key, **worker},
            **engine,
        }
        super().__init__(["-P", "-m", "engine_core", "--config", json.dumps(config)])

    def await_ready(self) -> None:
        Client(self.address, wait_s=START_S).close()

    @property
    def worker_pid(self) -> int:
        ((pid, words),) = descendants_of(self.process.pid)
        assert "-m worker" in words
        return pid

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the engine and its worker."""
        os.killpg(self.process.pid, number)
