"""Request timeouts over HTTP: what reaches the engine, and how a request ends that takes too
long."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from protocol.wire.errors import ErrorInfo
from tests.support.gateway_process import GatewayProcess
from tests.support.http import events_of, exchange
from tests.support.scripted_engine import ScriptedEngine, TokenReply, ids_of, text_reply

HI = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
    "/v1/responses": {"input": "hi"},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {}},
}
QUEUED = ErrorInfo(
    code="queue_timeout", message="queue_timeout_s: busy", param="queue_timeout_s", retry_after_s=7
)
RUNNING = ErrorInfo(code="timeout", message="timeout_s: over", param="timeout_s")


ENGINE = {"script": lambda generate: text_reply("Hello")}
GATEWAY = {"timeout_s": 50.0}


@pytest.mark.parametrize("route", ROUTES)
def test_every_api_accepts_both_timeouts_and_defaults_to_the_operators(
    route: str, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    said = {"timeout_s": 4.5, "queue_timeout_s": 2}
    assert gateway.post(route, ROUTES[route] | said).status_code == 200
    assert gateway.post(route, ROUTES[route]).status_code == 200
    result = [(generate.timeout_s, generate.queue_timeout_s) for generate in engine.generates]
    assert result == [(4.5, 2.0), (50.0, 0.0)]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_too_long_is_a_429_even_for_a_stream(
    route: str, stream: bool, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: TokenReply([[]], "error", None, QUEUED)
    body = ROUTES[route] | {"stream": stream, "queue_timeout_s": 1}
    status, headers, data = exchange(gateway.port, route, body)
    assert (status, headers["retry-after"]) == (429, "7")
    assert b"queue_timeout_s" in data


@pytest.mark.parametrize("route", ROUTES)
def test_a_whole_answer_that_is_not_done_in_time_is_a_504_that_no_sdk_repeats(
    route: str, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: TokenReply([ids_of("He")], "error", None, RUNNING)
    status, headers, data = exchange(gateway.port, route, ROUTES[route])
    assert (status, headers["x-should-retry"]) == (504, "false")
    assert "timeout_error" in data.decode()


def test_a_stream_that_times_out_sends_its_tokens_and_then_the_error(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: TokenReply(
        [ids_of("He"), ids_of("llo"), []], "error", None, RUNNING
    )
    body = {"messages": HI, "stream": True, "queue_timeout_s": 3}
    status, _, data = exchange(gateway.port, "/v1/chat/completions", body)
    assert status == 200
    events = events_of(data)
    text = "".join(c["delta"].get("content") or "" for e in events[:-1] for c in e["choices"])
    assert text == "Hello"
    assert events[-1]["error"]["code"] == "timeout"


def test_an_sdks_own_timeout_is_the_limit_of_a_whole_answer_and_of_no_stream(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    base = f"http://127.0.0.1:{gateway.port}"
    with openai.OpenAI(base_url=f"{base}/v1", api_key="x", timeout=7.5, max_retries=0) as client:
        client.chat.completions.create(model="scripted", messages=HI)  # type: ignore[arg-type]
        list(client.chat.completions.create(model="scripted", messages=HI, stream=True))  # type: ignore[arg-type]
    with anthropic.Anthropic(base_url=base, api_key="x", timeout=8.5, max_retries=0) as claude:
        claude.messages.create(model="scripted", max_tokens=5, messages=HI)  # type: ignore[arg-type]
    assert [generate.timeout_s for generate in engine.generates] == [7.5, 50.0, 8.5]
