"""A LoRA adapter is replaced while a request for it is on its way to the engine."""

from __future__ import annotations

import pytest
import requests

from protocol.engine.adapters import AdapterInfo
from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import ScriptedEngine


@pytest.fixture(autouse=True)
def fresh_engine(engine: ScriptedEngine) -> None:
    engine.await_idle()
    engine.reset()
    engine.adapters = [adapter("d1")]


def adapter(digest: str) -> AdapterInfo:
    return AdapterInfo(name="fr", digest=digest, rank=8, path=digest)


def complete(gateway: GatewayProcess, **fields: object) -> requests.Response:
    body = {"model": "fr", "prompt": "a prompt", "timings": True, **fields}
    return gateway.post("/v1/completions", body, headers={"X-Request-Id": "it"})


def received(engine: ScriptedEngine) -> list[str]:
    return [each.adapter_digest for each in engine.generates]


def test_all_choices_are_computed_with_the_adapter_that_has_replaced_the_first(
    engine: ScriptedEngine,
) -> None:
    with GatewayProcess(engine=engine.address) as gateway:
        assert complete(gateway.await_ready()).status_code == 200
        engine.adapters = [adapter("d2")]  # the gateway does not know it yet
        reply = complete(gateway, n=3)
        assert (reply.status_code, len(reply.json()["choices"])) == (200, 3)
        assert received(engine) == ["d1"] + ["d1"] * 3 + ["d2"] * 3
        assert complete(gateway).status_code == 200
        assert received(engine)[-1] == "d2"
        metrics = requests.get(gateway.url + "/metrics", timeout=5).text
    assert "\ntidegate_open_answers 0.0\n" in metrics
    timings = reply.json()["timings"]
    assert timings["total_ms"] >= timings["first_token_ms"] > 0


def test_a_streamed_request_is_sent_again_before_its_headers(engine: ScriptedEngine) -> None:
    with GatewayProcess(engine=engine.address) as gateway:
        gateway.await_ready()
        engine.adapters = [adapter("d2")]
        reply = complete(gateway, stream=True)
    assert reply.status_code == 200
    assert reply.text.endswith("data: [DONE]\n\n")


def test_an_adapter_that_was_unloaded_meanwhile_is_not_found(engine: ScriptedEngine) -> None:
    with GatewayProcess(engine=engine.address) as gateway:
        gateway.await_ready()
        engine.adapters = []
        reply = complete(gateway)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


def test_a_request_is_sent_again_only_once(engine: ScriptedEngine) -> None:
    """Its client is asked to try again if the adapter is replaced a second time."""
    with GatewayProcess(engine=engine.address) as gateway:
        gateway.await_ready()
        engine.adapters = [adapter("d2")]
        engine.replaces_adapters = True
        reply = complete(gateway)
        assert received(engine) == ["d1", "d2"]
        engine.replaces_adapters = False
        assert complete(gateway).status_code == 200
    assert (reply.status_code, reply.headers["Retry-After"]) == (503, "1")
    assert reply.json()["error"]["code"] == "stale_adapter"
