"""A scripted engine and a gateway, one of each per test module.

A module can set the options of both in its dicts ENGINE and GATEWAY. A store is then the name of a
file in a new folder. The engine is reset before each test, and a test must leave no request open.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import ScriptedEngine

STORES = {"response_store", "file_store"}


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ScriptedEngine]:
    address = f"ipc://{tmp_path_factory.mktemp('engine') / 'engine.sock'}"
    with ScriptedEngine(address, **getattr(request.module, "ENGINE", {})) as engine:
        yield engine


@pytest.fixture(scope="module")
def gateway(
    request: pytest.FixtureRequest,
    engine: ScriptedEngine,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[GatewayProcess]:
    options = getattr(request.module, "GATEWAY", {})
    folder = tmp_path_factory.mktemp("stores")
    stores = {name: str(folder / options[name]) for name in STORES & options.keys()}
    with GatewayProcess(engine=engine.address, **options | stores) as gateway:
        yield gateway.await_ready()


@pytest.fixture(autouse=True)
def _fresh_engine(request: pytest.FixtureRequest) -> Iterator[None]:
    engine = request.getfixturevalue("engine") if "engine" in request.fixturenames else None
    if isinstance(engine, ScriptedEngine):
        engine.reset()
    yield
    if isinstance(engine, ScriptedEngine):
        engine.reset()
        engine.await_idle()
