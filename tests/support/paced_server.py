"""A real gateway and a real engine whose worker is a paced one: its steps take known times."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protocol.sdk.client import Client
from tests.support.gateway_process import GatewayProcess
from tests.support.processes import ROOT, Program

START_S = 60.0
FOLDER = ROOT / "tests" / "support" / "paced_worker"


@contextmanager
def paced_server(
    model: str,
    gpu: str,
    *,
    gateway: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    **worker: Any,
) -> Iterator[GatewayProcess]:
    """Start an engine and a gateway, and yield the gateway once it is ready.

    model, gpu       names in the simulator's table
    gateway, engine  fields of GatewayConfig and of EngineConfig
    worker           fields of WorkerConfig
    """
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "run").mkdir(mode=0o700)
        address = f"ipc://{name}/run/engine.sock"
        settings = {"address": address, "worker": {"model": f"{model}@{gpu}", **worker}}
        settings |= engine or {}
        path = {"PYTHONPATH": f"{FOLDER}:{ROOT}"}
        command = ["-P", "-m", "engine_core", "--config", json.dumps(settings)]
        with Program(command, environment=path):
            Client(address, wait_s=START_S).close()
            with GatewayProcess(engine=address, **(gateway or {})) as process:
                yield process.await_ready()
