"""A browser, a real gateway and a scripted engine, for tests of the web page."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.browser import Visit, chromium
from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import ScriptedEngine, thinking_card
from tests.support.scripted_library import OWN, ScriptedLibrary
from tests.support.scripted_supervisor import ScriptedSupervisor

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Visitor = Callable[..., Visit]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Yield a browser. Its library runs an event loop in this thread, so the browser must be closed
    before the tests of other files use asyncio."""
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def engine(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    address = f"ipc://{tmp_path_factory.mktemp('engine') / 'engine.sock'}"
    with ScriptedEngine(address, card=thinking_card(), max_len=1 << 20) as engine:
        yield engine


@pytest.fixture(scope="module")
def gateway(
    engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    files = str(tmp_path_factory.mktemp("files") / "files.db")
    with GatewayProcess(engine=engine.address, file_store=files, log_requests=False) as gateway:
        yield gateway.await_ready()


@pytest.fixture
def visit(browser: Browser, gateway: GatewayProcess) -> Iterator[Visitor]:
    """Yield a function that opens a window with its own storage. At the end of the test, each
    window is checked and closed.

    url      the server; default: the shared gateway
    options  fields of `Visit`
    """
    with ExitStack() as stack:

        def visitor(url: str = gateway.url, **options: Any) -> Visit:
            return stack.enter_context(Visit(browser, url, **options))

        yield visitor


@pytest.fixture
def library(engine: ScriptedEngine) -> Iterator[tuple[ScriptedLibrary, GatewayProcess]]:
    """Yield a supervisor and its gateway. A test requests them before `visit`, so that the page is
    closed before they are: it asks them for the progress of downloads."""
    with tempfile.TemporaryDirectory() as folder:  # a short path, for the socket
        path = Path(folder) / "control.sock"
        models = [{"served_name": [OWN], "engine": engine.address}]
        with ScriptedSupervisor(path, {OWN: "ready"}) as supervisor:
            scripted = ScriptedLibrary(supervisor, engine)
            with GatewayProcess(
                models=models, control=str(path), file_store="none", manage_models=True
            ) as gateway:
                yield scripted, gateway.await_ready()
