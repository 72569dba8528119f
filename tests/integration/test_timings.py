"""`timings` are sent by every API, whole and streamed, if requested. They are the engine's times in
milliseconds and those that the gateway measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import requests

from gateway.observe.timings import Timings
from tests.support.anthropic import anthropic_events
from tests.support.gateway_process import GatewayProcess
from tests.support.http import events_of
from tests.support.responses import typed_events
from tests.support.scripted_engine import text_reply

HI = [{"role": "user", "content": "hi"}]
TEXT = "Hello, world!"
NUM_TOKENS = len(TEXT) + 1
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hello"},
    "/v1/messages": {"messages": HI, "max_tokens": 99},
    "/v1/responses": {"input": "hi", "store": False},
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {}},
}


ENGINE = {"script": lambda generate: text_reply(TEXT)}
GATEWAY = {"response_store": "none"}


def of_messages(response: requests.Response) -> dict[str, Any]:
    (delta,) = [
        event for event in anthropic_events(response.content) if event["type"] == "message_delta"
    ]
    return delta


def of_responses(response: requests.Response) -> dict[str, Any]:
    whole: dict[str, Any] = typed_events(response.content)[-1]["response"]
    return whole


def of_chunks(response: requests.Response) -> dict[str, Any]:
    chunk: dict[str, Any] = events_of(response.content)[-1]
    return chunk


LAST: dict[str, Callable[[requests.Response], dict[str, Any]]] = {
    "/v1/messages": of_messages,
    "/v1/responses": of_responses,
}


def asked(gateway: GatewayProcess, path: str, **more: Any) -> dict[str, Any]:
    """Send a request. Return the object of its answer that may contain timings."""
    response = gateway.post(path, {**BODIES[path], **more})
    assert response.status_code == 200, response.text
    if more.get("stream"):
        return LAST.get(path, of_chunks)(response)
    body: dict[str, Any] = response.json()
    return body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_every_api_sends_timings_in_whole_answers_and_streams(
    gateway: GatewayProcess, path: str, stream: bool
) -> None:
    result = msgspec.convert(asked(gateway, path, timings=True, stream=stream)["timings"], Timings)
    assert (result.queue_ms, result.prompt_ms, result.predicted_ms) == (250, 500, 2000)
    assert result.predicted_n == NUM_TOKENS
    assert result.predicted_per_second == (NUM_TOKENS - 1) / 2
    assert result.cache_n == 2
    assert result.prompt_n > 0
    assert result.grammar_ms == result.preempted_ms == result.fetch_ms == 0
    assert 0 < result.detokenize_ms < result.total_ms
    assert result.first_token_ms is not None
    assert 0 <= result.tokenize_ms < result.first_token_ms <= result.total_ms


@pytest.mark.parametrize("path", BODIES)
def test_timings_are_sent_only_if_requested(gateway: GatewayProcess, path: str) -> None:
    assert "timings" not in asked(gateway, path)
    assert "timings" not in asked(gateway, path, stream=True)


def test_timings_come_with_the_usage_if_both_are_requested(gateway: GatewayProcess) -> None:
    for path in ("/v1/chat/completions", "/inference/v1/generate"):
        options = {"include_usage": True}
        last = asked(gateway, path, timings=True, stream=True, stream_options=options)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == last["timings"]["predicted_n"]


def test_tokens_of_all_choices_are_counted(gateway: GatewayProcess) -> None:
    result = asked(gateway, "/v1/chat/completions", timings=True, n=3)["timings"]
    assert result["predicted_n"] == 3 * NUM_TOKENS
    assert result["predicted_per_second"] == 3 * (NUM_TOKENS - 1) / 2
