"""Scenarios that a trustworthy server must pass, as a client sees them.

The gateway is real, and the engine sends scripted tokens. A number in the name of a test is the
number of its scenario.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import ScriptedEngine, thinking_card


@pytest.fixture(scope="package")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    address = f"ipc://{tmp_path_factory.mktemp('engine') / 'engine.sock'}"
    with ScriptedEngine(address, card=thinking_card(), max_len=1 << 20) as engine:
        yield engine


@pytest.fixture(scope="package")
def gateway(engine: ScriptedEngine) -> Iterator[GatewayProcess]:
    with GatewayProcess(engine=engine.address, log_requests=False) as gateway:
        yield gateway.await_ready()
