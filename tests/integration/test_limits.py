"""Limits of a key, with a real engine and two gateways that do not share state."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

import pytest
import requests

from protocol.shared.api_keys import KeyEntry, digest_of
from tests.support.gateway_process import GatewayProcess
from tests.support.http import error_of, json_of
from tests.support.processes import Program
from tests.support.tiny_checkpoint import write_tiny_llama
from tools.commands.keys import with_key, write

LIMITS: dict[str, dict[str, Any]] = {
    "free": {},
    "slow": {"requests_per_minute": 4},
    "brief": {"tokens_per_minute": 60},
    "narrow": {"concurrency": 2},
    "short": {"max_len": 16},
}


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[GatewayProcess]]:
    folder = tmp_path_factory.mktemp("limits")
    (folder / "model").mkdir()
    checkpoint = write_tiny_llama(folder / "model", max_position_embeddings=2000)
    (folder / "run").mkdir(mode=0o700)
    address = f"ipc://{folder}/run/engine.sock"
    worker = {"model": str(checkpoint), "dtype": "float32", "max_slots": 8, "kv_blocks": 513}
    config = {"address": address, "worker": {**worker, "threads": 1, "poison_slots": "wild"}}
    text = ""
    for name, limits in LIMITS.items():
        text = with_key(text, name, KeyEntry(digest=digest_of(key_of(name)), **limits))
    keys = folder / "keys.toml"
    write(keys, text)
    with (
        Program(["-P", "-m", "engine_core", "--config", json.dumps(config)]),
        GatewayProcess(engine=address, api_keys=str(keys)) as one,
        GatewayProcess(engine=address, api_keys=str(keys)) as two,
    ):
        yield [each.await_ready() for each in (one, two)]


def key_of(name: str) -> str:
    return f"tg-{name:x<43}"


def generate(
    gateway: GatewayProcess, name: str, *, prompt: int = 4, n: int = 1, **params: Any
) -> requests.Response:
    params = {"max_tokens": 4, "ignore_eos": True, "n": n, **params}
    return requests.post(
        gateway.url + "/inference/v1/generate",
        json={"token_ids": list(range(1, 1 + prompt)), "sampling_params": params},
        headers={"Authorization": f"Bearer {key_of(name)}"},
        timeout=60,
    )


def refusals(responses: list[requests.Response], limit: str) -> int:
    """Return how many requests were refused. Checks that each refusal names the limit and has a
    Retry-After."""
    refused = [response for response in responses if response.status_code != 200]
    for response in refused:
        error = error_of(response, 429)
        assert error["code"] == "rate_limit_exceeded"
        assert error["message"].startswith(f"{limit}: ")
        assert int(response.headers["Retry-After"]) >= 1
    return len(refused)


def test_requests_per_minute_hold_over_all_gateways(gateways: list[GatewayProcess]):
    each, started = cycle(gateways), time.monotonic()
    reply = [generate(next(each), "slow", n=3) for _ in range(8)]
    # An answer of many choices is one request, and one more is allowed every 15 s.
    most = 4 + (time.monotonic() - started) / 15
    assert 4 <= 8 - refusals(reply, "requests_per_minute") <= most


def test_tokens_per_minute_hold_over_all_gateways(gateways: list[GatewayProcess]):
    """Two requests use 330 tokens of 60. The next one is allowed after four and a half minutes."""
    one, two = gateways
    reply = [generate(one, "brief", prompt=10, max_tokens=20)]
    reply += [generate(each, "brief", prompt=10, max_tokens=290) for each in (two, one, two)]
    assert [response.status_code for response in reply] == [200, 200, 429, 429]
    assert refusals(reply, "tokens_per_minute") == 2


def test_concurrency_holds_over_all_gateways(gateways: list[GatewayProcess]):
    each = cycle(gateways)
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(generate, next(each), "narrow", max_tokens=300) for _ in range(6)]
        reply = [future.result() for future in asked]
    assert 1 <= refusals(reply, "concurrency") <= 4
    assert refusals([generate(gateways[0], "narrow", n=3)], "concurrency") == 1
    assert refusals([generate(gateways[1], "narrow", n=2)], "concurrency") == 0


def test_a_keys_own_length_limit_is_reported_like_the_models(gateways: list[GatewayProcess]):
    reply = generate(gateways[0], "short", prompt=20)
    assert "length is 16 tokens with this key" in error_of(reply, 400)["message"]
    assert generate(gateways[0], "short", prompt=10).status_code == 200


def test_other_keys_are_not_held_up(gateways: list[GatewayProcess]):
    for gateway in gateways:
        assert generate(gateway, "free").status_code == 200


def test_cached_prompts_are_found_by_their_own_key_alone(gateways: list[GatewayProcess]):
    def cached(name: str) -> int:
        details = json_of(generate(gateways[0], name, prompt=80))["usage"]["prompt_tokens_details"]
        return (details or {}).get("cached_tokens") or 0

    assert cached("free") == 0
    assert cached("narrow") == 0
    assert cached("free") > 0
