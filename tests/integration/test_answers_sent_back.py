"""What the server wrote, it takes back: an answer can be sent back as history on its API, and the
same conversation on the other APIs, whether the answer is whole, cut short or malformed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import requests

from gateway.formats.event_builder import INVALID_ARGUMENTS as INVALID
from tests.support.anthropic import anthropic_events
from tests.support.api_prompts import BODIES, chat_body, messages_body
from tests.support.gateway_process import GatewayProcess
from tests.support.http import events_of
from tests.support.responses import typed_events
from tests.support.scripted_engine import ScriptedEngine, prompt_of, text_reply, thinking_card

ENGINE = {"card": thinking_card(), "max_len": 1 << 14}
ASKED = [{"role": "user", "content": "?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
WHOLE = '<think>hm</think>Wait.<tool_call>{"name": "find", "arguments": {"word": "so"}}</tool_call>'
ANSWERS: Mapping[str, str] = {
    "whole": WHOLE,
    "two calls": WHOLE + '<tool_call>{"name": "find", "arguments": {}}</tool_call>',
    "unknown tool": WHOLE.replace("find", "lost"),
    "not JSON": WHOLE.replace('"so"', "so"),
    "not an object": WHOLE.replace('{"word": "so"}', "[1]"),
    "text for arguments": WHOLE.replace('{"word": "so"}', '"so"'),
    "too large": WHOLE.replace('"so"', "1e400"),
    "half of a pair": WHOLE.replace('"so"', '"\\ud83d"'),
    "empty": "",
    "only reasoning": "<think>hm",
} | {f"cut at {end}": WHOLE[:end] for end in range(40, len(WHOLE), 7)}
Json = dict[str, Any]


GATEWAY = {"served_name": ["m"], "response_store": "responses.db"}


def says(engine: ScriptedEngine, text: str) -> None:
    finish = "stop" if text in (WHOLE, "") else "length"
    engine.script = lambda generate: text_reply(text, finish=finish, marked=True, size=3)


def post(gateway: GatewayProcess, path: str, body: Json) -> Json:
    answer = gateway.post(path, body)
    assert answer.status_code == 200, f"{answer.text} for {json.dumps(body)}"
    return dict(answer.json())


# ---- each API's way to continue its own answer: (path, first body, body that sends it back)


def _chat_again(answer: Json, body: Json) -> Json:
    message = answer["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "done"}
        for call in message.get("tool_calls") or ()
    ]
    return {**body, "messages": [*body["messages"], message, *results, *ASKED]}


def _messages_again(answer: Json, body: Json) -> Json:
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "done"}
        for block in answer["content"]
        if block["type"] == "tool_use"
    ]
    turns = [
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [*results, {"type": "text", "text": "?"}]},
    ]
    return {**body, "messages": [*body["messages"], *turns]}


def _outputs(answer: Json) -> list[Json]:
    return [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}
        for item in answer["output"]
        if item["type"] == "function_call"
    ]


def _responses_again(answer: Json, body: Json) -> Json:
    items = [*body["input"], *answer["output"], *_outputs(answer), *ASKED]
    return {**body, "input": items}


def _responses_by_id(answer: Json, body: Json) -> Json:
    items = [*_outputs(answer), *ASKED]
    return {**body, "input": items, "previous_response_id": answer["id"]}


def _ollama_again(answer: Json, body: Json) -> Json:
    message = answer["message"]
    results = [
        {"role": "tool", "tool_name": call["function"]["name"], "content": "done"}
        for call in message.get("tool_calls") or ()
    ]
    return {**body, "messages": [*body["messages"], message, *results, *ASKED]}


RESPONSES_TOOL = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
WAYS: Mapping[str, tuple[str, Json, Callable[[Json, Json], Json]]] = {
    "chat": ("/v1/chat/completions", chat_body(ASKED, [TOOL]), _chat_again),
    "messages": (
        "/v1/messages",
        {**messages_body(ASKED, [TOOL]), "max_tokens": 400},
        _messages_again,
    ),
    "responses": (
        "/v1/responses",
        {"model": "m", "input": ASKED, "tools": [RESPONSES_TOOL], "store": False},
        _responses_again,
    ),
    "previous_response_id": (
        "/v1/responses",
        {"model": "m", "input": ASKED, "tools": [RESPONSES_TOOL]},
        _responses_by_id,
    ),
    "ollama": (
        "/api/chat",
        {"model": "m", "messages": ASKED, "tools": [TOOL], "stream": False},
        _ollama_again,
    ),
}
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages"} | {
    "responses": "/v1/responses",
    "ollama": "/api/chat",
}


@pytest.mark.parametrize("way", WAYS)
def test_an_api_takes_its_own_answers_back(
    gateway: GatewayProcess, engine: ScriptedEngine, way: str
) -> None:
    path, body, again = WAYS[way]
    for name, text in ANSWERS.items():
        says(engine, text)
        answer = post(gateway, path, body)
        says(engine, "So.")
        post(gateway, path, again(answer, body))
        prompt = prompt_of(engine)
        if name in ("whole", "two calls"):
            assert "Wait." in prompt, (name, prompt)
            assert prompt.count("done") == text.count("<tool_call>"), (name, prompt)


READERS: Mapping[str, Callable[[bytes], list[Any]]] = {
    "chat": events_of,
    "messages": anthropic_events,
    "responses": typed_events,
}


@pytest.mark.parametrize("way", READERS)
def test_a_call_that_is_not_sent_back_as_it_was_has_a_warning(
    gateway: GatewayProcess, engine: ScriptedEngine, way: str
) -> None:
    path, body, _ = WAYS[way]
    for name in ("not JSON", "not an object", "too large", "half of a pair", "whole"):
        says(engine, ANSWERS[name])
        expected = set() if name == "whole" else {INVALID}
        assert (name, warned(post(gateway, path, body))) == (name, expected)
        streamed = READERS[way](gateway.post(path, {**body, "stream": True}).content)
        assert (name, warned(streamed)) == (name, expected)


def warned(answer: Any) -> set[str]:
    """Return the codes of all warnings in an answer, or in the events of its stream."""
    if isinstance(answer, list):
        return set().union(*map(warned, answer))
    if not isinstance(answer, dict):
        return set()
    codes = {warning["code"] for warning in answer.get("warnings", ())}
    return codes.union(*map(warned, answer.values()))


def _history(message: Json) -> Sequence[Json]:
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "done"}
        for call in message.get("tool_calls") or ()
    ]
    return [*ASKED, message, *results, *ASKED]


@pytest.mark.parametrize("api", BODIES)
def test_the_other_apis_take_the_answers_of_a_chat(
    gateway: GatewayProcess, engine: ScriptedEngine, api: str
) -> None:
    for text in ANSWERS.values():
        says(engine, text)
        message = post(gateway, PATHS["chat"], chat_body(ASKED, [TOOL]))["choices"][0]["message"]
        says(engine, "So.")
        body = BODIES[api](_history(message), [TOOL])
        post(gateway, PATHS[api], {**body, "stream": False})


def test_a_repeated_id_of_a_tool_use_is_accepted(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    says(engine, "So.")
    use = {"type": "tool_use", "id": "functions.find:0", "name": "find", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "functions.find:0"}
    turns = [
        *ASKED,
        {"role": "assistant", "content": [use, use]},
        {"role": "user", "content": [{**result, "content": "R1"}, {**result, "content": "R2"}]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{**result, "content": "R3"}]},
    ]
    post(gateway, "/v1/messages", {"model": "m", "max_tokens": 5, "messages": turns})
    prompt = prompt_of(engine)
    assert [prompt.index(f"R{n}") for n in (1, 2, 3)] == sorted(
        prompt.index(f"R{n}") for n in (1, 2, 3)
    )
    missing = [*turns[:2], {"role": "user", "content": [{**result, "content": "R1"}]}]
    answer: requests.Response = gateway.post(
        "/v1/messages", {"model": "m", "max_tokens": 5, "messages": missing}
    )
    assert answer.status_code == 400
    assert "messages[1].content[1]" in answer.text
