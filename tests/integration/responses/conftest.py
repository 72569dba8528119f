"""A real gateway with its own store, and an engine that follows a script."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import THINKING_TEMPLATE, ScriptedEngine, thinking_card
from tests.support.waiting import HANG_S

REASONING_TEMPLATE = THINKING_TEMPLATE.replace(
    "{{ m.content }}",
    "{% if m.reasoning %}<think>\n{{ m.reasoning }}\n</think>\n\n{% endif %}{{ m.content }}",
)
"""A chat template that renders the reasoning of earlier messages too."""


@pytest.fixture(scope="package")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    address = f"ipc://{tmp_path_factory.mktemp('engine') / 'engine.sock'}"
    card = thinking_card(chat_template=REASONING_TEMPLATE)
    with ScriptedEngine(address, card=card, max_len=1 << 20) as engine:
        yield engine


@pytest.fixture(scope="package")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("store") / "private" / "responses.db")


@pytest.fixture(scope="package")
def gateway(engine: ScriptedEngine, store: str) -> Iterator[GatewayProcess]:
    with GatewayProcess(engine=engine.address, response_store=store) as gateway:
        yield gateway.await_ready()


@pytest.fixture(scope="package")
def twin(engine: ScriptedEngine, store: str) -> Iterator[GatewayProcess]:
    """Another gateway process with the same store."""
    with GatewayProcess(engine=engine.address, response_store=store) as gateway:
        yield gateway.await_ready()


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{gateway.url}/v1", api_key="k1", max_retries=0, timeout=HANG_S
    ) as client:
        yield client


@pytest.fixture
def elsewhere(twin: GatewayProcess) -> Iterator[OpenAI]:
    """A client of `twin`, with the same API key as `client`."""
    with OpenAI(base_url=f"{twin.url}/v1", api_key="k1", max_retries=0, timeout=HANG_S) as client:
        yield client


@pytest.fixture
def stranger(gateway: GatewayProcess) -> Iterator[OpenAI]:
    """A client with another API key."""
    with OpenAI(
        base_url=f"{gateway.url}/v1", api_key="k2", max_retries=0, timeout=HANG_S
    ) as client:
        yield client
