"""A server and a model that several test files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import SERVED_NAME, Server
from tests.support.tiny_checkpoint import write_babbling_llama


@pytest.fixture(scope="session")
def exact_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a float32 server of the default model, whose answers do not depend on the batch.

    The tests share it, because its start takes longer than most tests. A test must leave it as it
    was: with no open request, and with all its processes alive.
    """
    store = str(tmp_path_factory.mktemp("store") / "responses.db")
    options = ("--served-name", SERVED_NAME, "--drain-s", "2", "--dtype", "float32")
    with Server(*options, "--response-store", store) as running:
        yield running


@pytest.fixture(scope="session")
def babbling_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a small model with random weights that reads and writes text and chats."""
    folder: Path = write_babbling_llama(tmp_path_factory.mktemp("babbling"))
    return str(folder)
