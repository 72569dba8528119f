"""The Messages API with its official client, a real gateway and a scripted engine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import msgspec
import pytest
import requests

from gateway.api.anthropic.responses import AnsweredMessage, MessagesErrorAnswer, ModelPage
from gateway.http.sse import KEEP_ALIVE
from protocol.wire.errors import ErrorInfo
from tests.support.anthropic import anthropic_events, message_of, prompt_tokens
from tests.support.gateway_process import GatewayProcess
from tests.support.http import exchange
from tests.support.scripted_engine import (
    BLOCK_TOKENS,
    ScriptedEngine,
    TokenReply,
    ids_of,
    prompt_of,
    text_of,
    text_reply,
    thinking_card,
)

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": "scripted", "max_tokens": 400, "messages": HI}
WEATHER = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
THINKS_SAYS_CALLS = f"<think>\nhm, {{}}\n</think>\n\nLet me see.\n\n{CALL}"


ENGINE = {
    "card": thinking_card(),
    "max_len": 1 << 16,
    "script": lambda generate: text_reply("Hello, wörld! 👋"),
}
GATEWAY = {"served_name": ["scripted", "alias", "third"], "keep_alive_s": 0.2, "max_body_mib": 1}


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=gateway.url, api_key="sk-none", max_retries=0) as client:
        yield client


def answers(engine: ScriptedEngine, text: str, **options: Any) -> None:
    engine.script = lambda generate: text_reply(text, marked=True, **options)


def stream(gateway: GatewayProcess, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    status, headers, data = exchange(gateway.port, MESSAGES, {**body, "stream": True}, **options)
    assert status == 200, data
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["request-id"] == headers["x-request-id"]
    return anthropic_events(data)


def whole(gateway: GatewayProcess, body: dict[str, Any], **options: Any) -> Any:
    response = gateway.post(MESSAGES, body, **options)
    assert response.status_code == 200, response.text
    msgspec.json.decode(response.content, type=AnsweredMessage)
    return response.json()


# ---- answers


def test_an_answer_has_thinking_text_and_calls(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    answers(engine, THINKS_SAYS_CALLS)
    reply = whole(gateway, {**ASKED, "tools": [WEATHER]}, headers={"X-Request-Id": "mine"})
    thinking, said, call = reply["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm, {}")
    assert thinking["signature"]
    assert said == {"type": "text", "text": "Let me see."}
    assert (call["name"], call["input"]) == ("weather", {"city": "Köln"})
    assert (reply["id"], reply["stop_reason"]) == ("msg_mine", "tool_use")
    usage = reply["usage"]
    count = len(engine.generates[0].prompt.tolist())
    assert prompt_tokens(usage) == count
    assert usage["cache_read_input_tokens"] == 2
    assert usage["cache_creation_input_tokens"] == (count - 1) // BLOCK_TOKENS * BLOCK_TOKENS - 2
    assert usage["service_tier"] == "standard"
    assert usage["output_tokens_details"]["thinking_tokens"] == len("\nhm, {}\n")


def test_the_prompt_is_that_of_the_same_chat(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    whole(gateway, {**ASKED, "system": "Be kind.", "thinking": {"type": "disabled"}})
    chat = [{"role": "system", "content": "Be kind."}, *HI]
    gateway.post("/v1/chat/completions", {"messages": chat, "reasoning_effort": "none"})
    one, other = engine.generates
    assert text_of(one.prompt.tolist()) == text_of(other.prompt.tolist())
    assert "</think>" in text_of(one.prompt.tolist())


def test_a_budget_and_parameters_reach_the_engine(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    body = {
        **ASKED,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "temperature": 0.25,
        "top_k": 7,
        "seed": 11,
        "cache_salt": "pepper",
        "priority": -4,
        "max_tokens": 1 << 20,
    }
    whole(gateway, body)
    (generate,) = engine.generates
    assert generate.grammar is not None
    assert generate.grammar.budget is not None
    assert generate.grammar.budget.most == 1024
    params = generate.params
    assert (params.temperature, params.top_k, params.seed) == (0.25, 7, 11)
    assert (generate.namespace, generate.priority) == ("pepper", -4)
    assert params.max_tokens == 1 << 20  # the engine ends the answer when the context is full


def test_a_silent_stream_is_kept_alive_with_comments_and_then_pings(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: TokenReply([[], *([i] for i in ids_of("ok"))])
    engine.step_s = 0.5
    for version in ("1.1", "1.0"):
        body = {**ASKED, "stream": True}
        status, _, data = exchange(gateway.port, MESSAGES, body, version=version)
        assert status == 200
        before, start, after = data.partition(b"event: message_start")
        assert before == KEEP_ALIVE * (len(before) // len(KEEP_ALIVE))
        assert before
        kinds = [event["type"] for event in anthropic_events(start + after)]
        assert kinds.count("ping") > 1


def test_fields_without_effect_are_named(gateway: GatewayProcess) -> None:
    body = {**ASKED, "speed": "fast", "metadata": {"user_id": "u"}, "context_management": {}}
    reply = whole(gateway, body)
    assert reply["ignored_params"] == ["speed", "context_management"]
    start, *_ = stream(gateway, body)
    assert start["message"]["ignored_params"] == ["speed", "context_management"]
    response = gateway.post(MESSAGES, {**body, "strict_params": True})
    assert response.status_code == 400


def test_a_token_count_equals_the_usage_of_the_answer(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    body = {**ASKED, "tools": [WEATHER], "system": "Be kind.", "thinking": {"type": "adaptive"}}
    counted = gateway.post(COUNT, body).json()
    assert not engine.generates
    usage = whole(gateway, body)["usage"]
    assert counted == {"input_tokens": prompt_tokens(usage)}


# ---- the models


def models(gateway: GatewayProcess, path: str = "", **query: Any) -> requests.Response:
    return requests.get(
        f"{gateway.url}/v1/models{path}",
        params=query,
        headers={"anthropic-version": "2023-06-01"},
        timeout=10,
    )


def test_models_have_the_clients_shape(
    client: anthropic.Anthropic, gateway: GatewayProcess
) -> None:
    page = client.models.list()
    assert [model.id for model in page.data] == ["scripted", "alias", "third"]
    assert (page.has_more, page.first_id, page.last_id) == (False, "scripted", "third")
    for model in page.data:
        reply = client.models.retrieve(model.id)
        assert reply == model
        assert (reply.type, reply.display_name, reply.lifecycle) == ("model", "scripted", "active")
        assert reply.created_at.tzinfo is not None
        assert reply.max_input_tokens == 1 << 16
    msgspec.json.decode(models(gateway).content, type=ModelPage)
    assert requests.get(gateway.url + "/v1/models", timeout=10).json()["object"] == "list"


def test_models_come_in_pages(client: anthropic.Anthropic) -> None:
    page = client.models.list(limit=2)
    assert ([model.id for model in page.data], page.has_more) == (["scripted", "alias"], True)
    assert [model.id for model in client.models.list(limit=1)] == ["scripted", "alias", "third"]
    backward = client.models.list(limit=1, before_id="third")
    assert ([model.id for model in backward.data], backward.has_more) == (["alias"], True)
    last = client.models.list(after_id="third")
    assert (last.data, last.has_more, last.first_id) == ([], False, None)


@pytest.mark.parametrize(
    ("path", "query", "status", "param"),
    [
        ("/nobody", {}, 404, None),
        ("", {"limit": "0"}, 400, "limit"),
        ("", {"limit": "1001"}, 400, "limit"),
        ("", {"limit": "many"}, 400, "limit"),
        ("", {"after_id": "nobody"}, 400, "after_id"),
        ("", {"before_id": "nobody"}, 400, "before_id"),
    ],
)
def test_an_error_about_models_has_the_clients_shape(
    path: str, query: dict[str, str], status: int, param: str | None, gateway: GatewayProcess
) -> None:
    response = models(gateway, path, **query)
    error = msgspec.json.decode(response.content, type=MessagesErrorAnswer).error
    assert response.status_code == status
    assert (error.param or None) == param or param is None
    assert response.headers["request-id"]


# ---- the official client


def test_the_sdk_creates_and_counts(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**ASKED)
    assert message.content[0].text == "Hello, wörld! 👋"
    assert message.stop_reason == "end_turn"
    asked = {"model": "scripted", "messages": HI}
    counted = client.messages.count_tokens(**asked)  # type: ignore[arg-type]
    assert counted.input_tokens == prompt_tokens(message.usage.model_dump())
    assert message.usage.cache_creation is not None
    assert message.usage.service_tier == "standard"


def test_the_sdk_streams(engine: ScriptedEngine, client: anthropic.Anthropic) -> None:
    answers(engine, THINKS_SAYS_CALLS)
    with client.messages.stream(**ASKED, tools=[WEATHER]) as reply:  # type: ignore[list-item]
        kinds = [event.type for event in reply]
        message = reply.get_final_message()
    assert {"thinking", "signature", "text", "input_json", "message_stop"} <= set(kinds)
    thinking, said, call = message.content
    assert thinking.type == "thinking"
    assert (thinking.thinking, bool(thinking.signature)) == ("hm, {}", True)
    assert said.type == "text"
    assert said.text == "Let me see."
    assert call.type == "tool_use"
    assert call.input == {"city": "Köln"}
    assert message.usage.output_tokens > 0
    assert message.stop_reason == "tool_use"


def test_the_sdk_accepts_a_call_with_invalid_json(
    engine: ScriptedEngine, client: anthropic.Anthropic
) -> None:
    answers(engine, CALL.replace('"Köln"', "Köln"))
    with client.messages.stream(**ASKED, tools=[WEATHER]) as reply:  # type: ignore[list-item]
        (call,) = reply.get_final_message().content
    assert call.type == "tool_use"
    assert isinstance(call.input, dict)
    assert "INVALID_JSON" in call.input


def test_the_sdk_runs_a_tool_loop(engine: ScriptedEngine, client: anthropic.Anthropic) -> None:
    answers(engine, THINKS_SAYS_CALLS)
    first = client.messages.create(**ASKED, tools=[WEATHER])  # type: ignore[list-item]
    call = first.content[-1]
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    history: list[Any] = [
        *HI,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    answers(engine, "It rains.")
    asked = {**ASKED, "messages": history}
    with client.messages.stream(**asked, tools=[WEATHER]) as reply:  # type: ignore[list-item]
        assert "".join(reply.text_stream) == "It rains."
    prompt = prompt_of(engine)
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>' in prompt
    assert "<tool>rain" in prompt


ERRORS: list[tuple[dict[str, Any], type[anthropic.APIStatusError], str, str | None]] = [
    ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error", "max_tokens"),
    ({"model": "other"}, anthropic.NotFoundError, "not_found_error", "model"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        anthropic.BadRequestError,
        "invalid_request_error",
        "messages[0].content[0].source.type",
    ),
    (
        {"tools": [{**WEATHER, "name": "no name"}]},
        anthropic.BadRequestError,
        "invalid_request_error",
        "tools[0].name",
    ),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}},
        anthropic.BadRequestError,
        "invalid_request_error",
        "tool_choice.name",
    ),
    (
        {"messages": [{"role": "user", "content": "x" * (1 << 16)}]},
        anthropic.BadRequestError,
        "invalid_request_error",
        "messages",
    ),
]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("fields", "kind", "name", "param"), ERRORS)
def test_an_error_has_its_class_its_type_and_its_field(
    fields: dict[str, Any],
    kind: type[anthropic.APIStatusError],
    name: str,
    param: str | None,
    streams: bool,
    client: anthropic.Anthropic,
    engine: ScriptedEngine,
) -> None:
    too_long = ErrorInfo(code="context_length_exceeded", message="too long", param="prompt")
    engine.script = lambda generate: too_long
    with pytest.raises(kind) as raised:
        client.messages.create(**{**ASKED, **fields}, stream=streams)
    body: Any = raised.value.body
    assert body["error"]["type"] == name
    assert body["error"]["param"] == param
    assert raised.value.request_id == body["request_id"]


def test_an_overloaded_server_sends_retry_after(
    client: anthropic.Anthropic, engine: ScriptedEngine
) -> None:
    engine.script = lambda generate: ErrorInfo(
        code="overloaded", message="too much", retry_after_s=2.5
    )
    with pytest.raises(anthropic.RateLimitError) as raised:
        client.messages.create(**ASKED)
    assert raised.value.response.headers["retry-after"] == "3"
    assert raised.value.type == "rate_limit_error"


def test_an_error_in_the_middle_of_a_stream_is_an_error_of_the_client(
    client: anthropic.Anthropic, engine: ScriptedEngine
) -> None:
    failure = ErrorInfo(code="step_failed", message="a secret")
    engine.script = lambda generate: text_reply("half", finish="error", error=failure)
    engine.step_s = 0.05  # or it has failed before anything was sent, and the answer is a 500
    with client.messages.stream(**ASKED) as reply:
        texts = iter(reply.text_stream)
        assert "".join(itertools.islice(texts, len("half"))) == "half"
        with pytest.raises(anthropic.APIStatusError) as raised:
            next(texts)
    assert raised.value.type == "api_error"
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "kind"),
    [
        ("GET", MESSAGES, {}, 405, "invalid_request_error"),
        ("POST", MESSAGES + "/batches", {"json": {}}, 404, "not_found_error"),
        ("POST", MESSAGES, {"data": b"x", "headers": {"Content-Type": "text/plain"}}, 415, None),
        ("POST", MESSAGES, {"data": b"{"}, 400, "invalid_request_error"),
        ("POST", MESSAGES, {"data": b" " * (2 << 20)}, 413, "request_too_large"),
    ],
)
def test_errors_of_http_have_anthropics_shape(
    method: str,
    path: str,
    options: dict[str, Any],
    status: int,
    kind: str | None,
    gateway: GatewayProcess,
) -> None:
    response = requests.request(method, gateway.url + path, timeout=20, **options)
    assert response.status_code == status
    error = msgspec.json.decode(response.content, type=MessagesErrorAnswer)
    assert kind is None or error.error.type == kind
    assert response.headers["request-id"] == error.request_id


def test_other_paths_keep_their_shape(gateway: GatewayProcess) -> None:
    response = requests.get(gateway.url + "/v1/messagesx", timeout=20)
    assert response.status_code == 404
    assert "request_id" not in response.json()
    assert "request-id" not in response.headers


# ---- scenario 64: the session of an agent


def agent_tools() -> list[dict[str, Any]]:
    names = ("Bash", "Read", "Edit", "Grep", "Glob", "Task", "WebFetch", "TodoWrite", "mcp__x__y")
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"path": {"type": "string", "description": "Where."}},
        "required": ["path"],
        "additionalProperties": False,
    }
    tools: list[dict[str, Any]] = [
        {"name": name, "description": f"The tool {name}.", "input_schema": schema} for name in names
    ]
    tools[-1]["cache_control"] = {"type": "ephemeral"}
    return tools


IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}


def agent_turns() -> list[list[dict[str, Any]]]:
    """Return the content that an agent sends in each turn: a task, then results of the calls."""
    reminder = {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"}
    task = {"type": "text", "text": "Look at it.", "cache_control": {"type": "ephemeral"}}
    return [
        [reminder, task],
        [{"type": "text", "text": "a screenshot"}, IMAGE],
        [{"type": "text", "text": "No such file"}],
        [],
    ]


def test_64_an_agents_session_is_answered_turn_by_turn(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    """The session has thinking in its history, cache_control, token counts, tool results with
    images and errors, and many tools."""
    body: dict[str, Any] = {
        "model": "scripted",
        "max_tokens": 32_000,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=0a1b2;"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        ],
        "tools": agent_tools(),
        "metadata": {"user_id": "user_1_session_2"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "temperature": 1,
        "messages": [],
    }
    headers = {
        "x-api-key": "sk-none",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    }
    call = '<tool_call>\n{"name": "Read", "arguments": {"path": "/a"}}\n</tool_call>'
    answers(engine, f"I should look.\n</think>\n\nReading.\n\n{call}\n{call}")
    history: list[Any] = []
    num_warnings = []
    for blocks in agent_turns():
        calls = [b for m in history[-1:] for b in m["content"] if b["type"] == "tool_use"]
        content: list[dict[str, Any]] = blocks
        if calls:
            content = [
                {"type": "tool_result", "tool_use_id": call["id"], "content": blocks}
                | ({"is_error": True} if place else {})
                for place, call in enumerate(calls)
            ]
        history.append({"role": "user", "content": content})
        asked = {**body, "messages": history}
        counted = gateway.post(f"{COUNT}?beta=true", asked, headers=headers)
        assert counted.status_code == 200, counted.text
        events = stream(gateway, asked, headers=headers)
        message = message_of(events)
        assert prompt_tokens(message["usage"]) == counted.json()["input_tokens"]
        assert [block["type"] for block in message["content"]] == [
            *("thinking", "text", "tool_use", "tool_use")
        ]
        assert message["stop_reason"] == "tool_use"
        num_warnings.append(len(message.get("warnings", [])))
        history.append({"role": "assistant", "content": message["content"]})
    assert num_warnings == [0, 2, 2, 2]  # the images, each time they are in history
    prompt = prompt_of(engine)
    assert "billing" not in prompt
    assert json.dumps("iVBORw0KGgo=") not in prompt
