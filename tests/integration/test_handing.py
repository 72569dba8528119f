"""A router between servers: one computes a prompt, another continues from it, over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protocol.wire.errors import ErrorInfo
from tests.support.gateway_process import GatewayProcess
from tests.support.http import error_of
from tests.support.scripted_engine import ScriptedEngine, handle_of

KEEP = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}
BODIES: dict[str, dict[str, Any]] = {
    "/inference/v1/generate": {
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 5, "n": 2},
    },
    "/v1/completions": {"prompt": "once", "max_tokens": 5, "n": 2},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 5,
        "n": 2,
    },
}


@pytest.mark.parametrize("path", BODIES)
def test_a_prompt_is_computed_by_one_server_and_continued_by_another(
    engine: ScriptedEngine, gateway: GatewayProcess, path: str
) -> None:
    engine.generates.clear()
    kept = gateway.post(path, BODIES[path] | {"kv_transfer_params": KEEP}).json()
    (produce,) = engine.generates
    assert produce.kv_readers == 2
    params = {"do_remote_prefill": True, "handle": handle_of(produce)}
    assert kept["kv_transfer_params"] == params
    assert kept["choices"][0]["finish_reason"] == "length"
    assert kept["usage"]["completion_tokens"] == 0
    assert "ignored_params" not in kept

    engine.generates.clear()
    answer = gateway.post(path, BODIES[path] | {"kv_transfer_params": params}).json()
    assert [generate.kv_handle for generate in engine.generates] == [handle_of(produce)] * 2
    assert engine.generates[0].prompt == produce.prompt
    assert answer["usage"]["completion_tokens"] == 10
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # all of it was fetched
    assert answer.get("kv_transfer_params") is None


@pytest.mark.parametrize("path", BODIES)
def test_a_forbidden_field_is_a_400_that_names_it(gateway: GatewayProcess, path: str) -> None:
    forged = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 1}
    response = gateway.post(path, BODIES[path] | {"kv_transfer_params": forged})
    assert error_of(response, 400)["param"] == "kv_transfer_params.remote_host"


@pytest.mark.parametrize("path", BODIES)
def test_a_handle_that_the_engine_refuses_is_a_400(
    engine: ScriptedEngine, gateway: GatewayProcess, path: str
) -> None:
    before = engine.script
    engine.script = lambda generate: ErrorInfo(
        code="invalid_request", message="forged", param="kv_transfer_params"
    )
    params = {"do_remote_prefill": True, "handle": "forged"}
    response = gateway.post(path, BODIES[path] | {"kv_transfer_params": params})
    engine.script = before
    assert error_of(response, 400)["param"] == "kv_transfer_params"


def test_the_router_receives_null_if_no_kv_is_kept(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/engine.sock"
    with ScriptedEngine(address, kv_lease_s=0.0), GatewayProcess(engine=address) as gateway:
        gateway.await_ready()
        for path, body in BODIES.items():
            response = gateway.post(path, body | {"kv_transfer_params": KEEP}).json()
            assert response.get("kv_transfer_params") is None
            assert response["ignored_params"] == ["kv_transfer_params"]
            assert response["usage"]["completion_tokens"] == 10
