"""A client with more idle connections than the gateway may open locks nobody out."""

from __future__ import annotations

import contextlib
import re
import socket
from pathlib import Path

import pytest
import requests

from tests.support.gateway_process import CONFIG, GatewayProcess
from tests.support.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.long

SOFT, HARD = 128, 300
LIMITED = f"""
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({SOFT}, {HARD}))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_idle_connections_lock_nobody_out(engine: ScriptedEngine) -> None:
    command = ["-P", "-m", "gunicorn", "-c", str(CONFIG), "gateway.app:create_app()"]
    with (
        GatewayProcess(engine=engine.address, command=["-c", LIMITED, *command]) as gateway,
        contextlib.ExitStack() as idle,
    ):
        gateway.await_ready()
        pid = requests.get(gateway.url + "/readyz", timeout=20).json()["gateway"]["pid"]
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert re.search(rf"Max open files +{HARD} +{HARD}", limits), "the soft limit was raised"
        for _ in range(2):
            for _ in range(HARD):
                client = socket.create_connection(("127.0.0.1", gateway.port), timeout=20)
                idle.enter_context(client)
            assert requests.get(gateway.url + "/livez", timeout=20).status_code == 200
        assert "Too many open files" not in gateway.log
