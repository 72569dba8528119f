"""`tidegate serve A B`: models are loaded at their first request, and make room for each other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.support.http import json_of
from tests.support.server import Server
from tests.support.tiny_checkpoint import write_roomy_llama
from tests.support.waiting import HANG_S, eventually

LONG_TOKENS = 3000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_roomy_llama(tmp_path_factory.mktemp("roomy"))
    options = ("--load", "first-use", "--max-loaded", "1", "--idle-unload-s", "1.5")
    with Server(*options, models=[f"first={model}", f"second={model}"]) as running:
        yield running


def complete(server: Server, model: str, max_tokens: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "prompt": [5, 6, 7],
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    response = requests.post(f"{server.url}/v1/completions", json=body, timeout=HANG_S)
    answer: dict[str, Any] = json_of(response)
    assert answer["usage"]["completion_tokens"] == max_tokens
    return answer


def states(server: Server) -> dict[str, str]:
    answer = requests.get(f"{server.url}/readyz", timeout=HANG_S)
    assert answer.status_code == 200, "a server is ready if all models are unloaded"
    return {each["id"]: each["state"] for each in answer.json()["models"]}


def test_requests_load_the_models_in_turn_and_each_one_is_answered_in_full(server: Server) -> None:
    assert states(server) == {"first": "unloaded", "second": "unloaded"}
    with ThreadPoolExecutor() as pool:
        long = pool.submit(complete, server, "first", LONG_TOKENS)
        assert eventually(lambda: states(server)["first"] == "ready")
        other = pool.submit(complete, server, "second", 5)
        assert eventually(lambda: states(server)["second"] == "waiting")
        assert long.result()["model"] == "first"  # it was not unloaded under its request
        assert other.result()["model"] == "second"
    idle = {"first": "unloaded", "second": "unloaded"}
    assert eventually(lambda: states(server) == idle), "unused for --idle-unload-s"
