"""A gateway with a file store, and an engine that follows a script."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from protocol.engine.encoding import EncodingCard
from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import ScriptedEngine, scripted_card
from tests.support.waiting import HANG_S


@pytest.fixture(scope="package")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    address = f"ipc://{tmp_path_factory.mktemp('engine') / 'engine.sock'}"
    encoding = EncodingCard(task="embed", max_tokens=64, size=6, pooling="mean", normalizes=True)
    card = scripted_card(encoding=encoding)
    with ScriptedEngine(address, card=card, max_len=1 << 16) as engine:
        yield engine


@pytest.fixture(scope="package")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("files") / "private" / "files.db")


@pytest.fixture(scope="package")
def gateway(engine: ScriptedEngine, store: str) -> Iterator[GatewayProcess]:
    with GatewayProcess(engine=engine.address, file_store=store, file_max_mib=4) as gateway:
        yield gateway.await_ready()


def client_of(gateway: GatewayProcess, key: str = "k1") -> OpenAI:
    return OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0, timeout=HANG_S)


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[OpenAI]:
    with client_of(gateway) as client:
        yield client


@pytest.fixture
def stranger(gateway: GatewayProcess) -> Iterator[OpenAI]:
    """A client with another API key."""
    with client_of(gateway, "k2") as client:
        yield client
