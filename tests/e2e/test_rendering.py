"""Fifty chats are rendered, generated and derendered. The answers must equal those of the chat
endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import requests

from tests.support.http import (
    events_of,
    fold_chat_response,
    fold_chat_stream,
    fold_response,
    fold_stream,
)
from tests.support.server import Server

NUM_ANSWERS = 50
CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
TOOL = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ASKS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Name three fruits."}]},
    {"messages": [{"role": "user", "content": "Write a haiku 🌸"}], "stop": ["\n", "the"]},
    {
        "messages": [{"role": "user", "content": "Count to ten."}],
        "logprobs": True,
        "top_logprobs": 3,
        "return_token_ids": True,
    },
    {
        "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "required",
    },
    {
        "messages": [{"role": "user", "content": "A person, as JSON."}],
        "response_format": {"type": "json_object"},
    },
]


@pytest.fixture(scope="module")
def server(babbling_model: str) -> Iterator[Server]:
    """Yield a float32 server, whose answers do not depend on the batch. The model has random
    weights: its answers differ more than those of the default model, and take a fraction of the
    time."""
    options = ("--drain-s", "2", "--dtype", "float32")
    with Server(*options, model=babbling_model) as running:
        yield running


def post(server: Server, path: str, body: Any) -> requests.Response:
    response = requests.post(server.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response


def without_ids(said: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the choices without the ids of calls, which are random."""
    for choice in said.values():
        choice["calls"] = [call[1:] for call in choice["calls"]]
    return said


def logprobs_of(choices: dict[int, dict[str, Any]]) -> tuple[list[str], list[float]]:
    """Remove the logprobs of choice 0, and return them as (tokens, logprobs)."""
    content = (choices[0].pop("logprobs") or {"content": []})["content"]
    return [token["token"] for token in content], [token["logprob"] for token in content]


def check_logprobs(found: tuple[list[str], list[float]], other: tuple[list[str], Any]) -> None:
    """Check that logprobs are nearly equal. Cached parts of a prompt change their last digits."""
    assert found[0] == other[0]
    assert found[1] == pytest.approx(other[1], abs=1e-3)


def chunks_of(server: Server, body: Any, stream: bytes) -> list[Any]:
    """Return the derendered chunks of a streamed answer."""
    chunks, state = [], None
    for chunk in events_of(stream):
        derender = {"stream": True, "chat_request": body, "generate_chunk": chunk}
        result = post(server, f"{CHAT}/derender", {**derender, "stream_state": state}).json()
        state = result["stream_state"]
        chunks += [result["chunk"]] if result["chunk"] else []
    return chunks


def compare(server: Server, seed: int) -> None:
    body = {**ASKS[seed % len(ASKS)], "seed": seed, "max_tokens": 12, "top_p": 0.9}
    chat = post(server, CHAT, body).json()
    request = post(server, f"{CHAT}/render", body).json()
    response = post(server, GENERATE, request).json()
    stream = post(server, GENERATE, {**request, "stream": True}).content
    derender = {"chat_request": body, "generate_response": response}
    whole = post(server, f"{CHAT}/derender", derender).json()
    chunks = chunks_of(server, body, stream)

    said = without_ids(fold_chat_response(chat))
    assert without_ids(fold_chat_response(whole)) == without_ids(fold_chat_stream(chunks)) == said
    expected, found = fold_response(chat), fold_response(whole)
    logprobs = logprobs_of(expected)
    check_logprobs(logprobs_of(found), logprobs)
    check_logprobs(logprobs_of(fold_stream(chunks)), logprobs)
    assert found == expected
    assert whole["usage"]["completion_tokens"] == chat["usage"]["completion_tokens"]


@pytest.mark.timeout(300)
def test_fifty_answers_by_way_of_tokens_are_those_of_a_chat(server: Server) -> None:
    with ThreadPoolExecutor(10) as pool:
        compared = list(pool.map(partial(compare, server), range(NUM_ANSWERS)))
    assert len(compared) == NUM_ANSWERS
