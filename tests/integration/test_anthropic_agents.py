"""Agents on the Messages API: threads, tools that are loaded later, thinking between two steps.

The sessions with Anthropic's SDK are those of its own tool runner.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from gateway.api.anthropic.tools import TOOL_LEFT_OUT
from tests.support.gateway_process import GatewayProcess
from tests.support.http import json_of
from tests.support.scenarios import call
from tests.support.scripted_engine import (
    THINKING_TEMPLATE,
    Reply,
    ScriptedEngine,
    prompt_of,
    text_of,
    text_reply,
    thinking_card,
)

REASONING = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
TEMPLATE = THINKING_TEMPLATE.replace("{{ m.content }}", REASONING + "{{ m.content }}")
ENGINE = {"card": thinking_card(chat_template=TEMPLATE), "max_len": 1 << 16}
MESSAGES = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": "scripted", "max_tokens": 400, "messages": HI}
QUESTION = "How is the weather in Oslo?"
RAIN = "Rain, 4 degrees."
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
        yield client


def follows(engine: ScriptedEngine, *turns: tuple[str, str]) -> None:
    """Make the engine reply with the text of the last turn whose sign occurs in the prompt."""

    def script(generate: Any) -> Reply:
        prompt = text_of(generate.prompt.tolist())
        text = next(text for sign, text in reversed(turns) if sign in prompt)
        return text_reply(text, size=3, marked=True)

    engine.script = script


def says(engine: ScriptedEngine, text: str) -> None:
    engine.script = lambda generate: text_reply(text, size=3, marked=True)


# ---- threads


@pytest.mark.parametrize("path", [MESSAGES, MESSAGES + "/count_tokens"])
@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}]
)
def test_a_thread_is_refused_with_the_code_that_sdks_expect(
    thread: Any, path: str, gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    answer = gateway.post(path, {**ASKED, "thread": thread})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert error["param"] == "thread"
    assert engine.generates == []
    assert gateway.post(path, {**ASKED, "thread": None}).status_code == 200


@anthropic.beta_tool
def weather(city: str) -> str:
    """The weather in a city."""
    assert city == "Oslo"
    return RAIN


def test_a_tool_runner_goes_on_without_threads(
    client: anthropic.Anthropic, engine: ScriptedEngine
) -> None:
    follows(engine, (QUESTION, call("weather", {"city": "Oslo"})), (RAIN, "It rains."))
    runner = client.beta.messages.tool_runner(
        model="scripted",
        max_tokens=400,
        tools=[weather],
        messages=[{"role": "user", "content": QUESTION}],
    )
    last = runner.until_done()
    assert [block.text for block in last.content if block.type == "text"] == ["It rains."]
    prompt = prompt_of(engine)
    assert QUESTION in prompt
    assert RAIN in prompt


def test_a_thread_of_the_sdk_sends_its_whole_history(
    client: anthropic.Anthropic, engine: ScriptedEngine
) -> None:
    thread = client.beta.messages.thread(
        model="scripted",
        max_tokens=100,
        system="Be brief.",
        unsupported_request_behavior="continue_unthreaded",
    )
    says(engine, "Hello Ada.")
    thread.send({"role": "user", "content": "I am Ada."})
    thread.send({"role": "user", "content": "Who am I?"})
    prompt = prompt_of(engine)
    for text in ("Be brief.", "I am Ada.", "Hello Ada.", "Who am I?"):
        assert text in prompt


# ---- thinking between two steps


@pytest.mark.parametrize("display", ["summarized", "omitted", "updates", None])
def test_the_next_step_has_the_thinking_of_the_one_before(
    display: str | None, client: anthropic.Anthropic, engine: ScriptedEngine
) -> None:
    says(engine, f"<think>\nOslo is in Norway.\n</think>\n\n{call('weather', {'city': 'Oslo'})}")
    asked: dict[str, Any] = {
        **ASKED,
        "tools": [weather.to_dict()],
        "thinking": {"type": "adaptive"} | ({"display": display} if display else {}),
    }
    first = client.beta.messages.create(**asked)
    shown = [block.thinking for block in first.content if block.type == "thinking"]
    assert [text.strip() for text in shown] == [
        "" if display == "omitted" else "Oslo is in Norway."
    ]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": RAIN}
        for block in first.content
        if block.type == "tool_use"
    ]
    answer = {"role": "assistant", "content": first.content}
    client.beta.messages.create(
        **{**asked, "messages": [*HI, answer, {"role": "user", "content": results}]}
    )
    assert "<think>Oslo is in Norway.</think>" in prompt_of(engine)


# ---- tools


def test_a_tool_that_is_loaded_later_leaves_the_start_of_the_prompt_as_it_was(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    find = {"name": "find", "input_schema": {"type": "object"}}
    tools = [find, {**weather.to_dict(), "defer_loading": True}]
    says(engine, call("find", {}))
    first = json_of(gateway.post(MESSAGES, {**ASKED, "tools": tools}))
    before = prompt_of(engine).removesuffix("<assistant>")
    (use,) = first["content"]
    loaded = [{"type": "tool_reference", "tool_name": "weather"}]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": loaded}
    turns = [
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    says(engine, call("weather", {"city": "Oslo"}))
    second = json_of(gateway.post(MESSAGES, {**ASKED, "tools": tools, "messages": HI + turns}))
    assert prompt_of(engine).startswith(before)
    assert "The tool weather is available now:" in prompt_of(engine)
    assert second["stop_reason"] == "tool_use"
    assert second["content"][0]["input"] == {"city": "Oslo"}
    assert "warnings" not in second


def test_tools_of_anthropics_servers_are_listed_and_refused_only_if_strict(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    body = {
        **ASKED,
        "tools": [SEARCH, weather.to_dict()],
        "mcp_servers": [{"type": "url", "url": "https://example.org", "name": "x"}],
    }
    answer = gateway.post(MESSAGES, body)
    assert answer.headers["X-Ignored-Fields"] == "mcp_servers, tools[0]"
    message = json_of(answer)
    assert message["ignored_params"] == ["mcp_servers", "tools[0]"]
    assert {warning["code"] for warning in message["warnings"]} == {TOOL_LEFT_OUT}
    assert "web_search" not in prompt_of(engine)
    for path in (MESSAGES, MESSAGES + "/count_tokens", MESSAGES + "/render"):
        assert gateway.post(path, body).status_code == 200
        refused = gateway.post(path, {**body, "strict_params": True})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "mcp_servers"
