"""Scenarios of thinking: how it is turned on, where it ends, and how it is reported."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess
from tests.support.http import error_of
from tests.support.scenarios import (
    CHAT,
    COLOGNE,
    HI,
    OFF,
    ON,
    SCHEMA,
    WITH_TOOLS,
    Tasteful,
    answers,
    both,
    json_schema,
    stream,
    whole,
)
from tests.support.scripted_engine import EOS, ScriptedEngine, marked_ids


@pytest.mark.parametrize("spelling", OFF)
def test_16_thinking_off_is_all_content_and_thinking_on_starts_inside(
    spelling: str, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    answers(engine, "All of this is the answer.")
    off = whole(gateway, {"messages": HI, **OFF[spelling]})["choices"][0]["message"]
    assert (off["content"], off["reasoning"]) == ("All of this is the answer.", None)
    answers(engine, "I think.\n</think>\n\nYes.")
    body = {"messages": HI, "return_effective_kwargs": True, **ON[spelling]}
    on = whole(gateway, body)
    message = on["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("Yes.", "I think.")
    assert message["reasoning_content"] == "I think."
    assert on["effective"] == {"chat_template_kwargs": {"enable_thinking": True}}
    answers(engine, "I think on and on")
    assert both(gateway, {"messages": HI, **ON[spelling]})["reasoning"] == "I think on and on"


def test_reasoning_is_counted_and_may_be_left_out(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    answers(engine, f"<think>12345</think>yes{COLOGNE}", size=4)
    answer = whole(gateway, WITH_TOOLS)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    silent = both(gateway, {**WITH_TOOLS, "include_reasoning": False})
    assert (silent["reasoning"], silent["content"]) == ("", "yes")


def test_logprobs_and_ids_cover_every_token_of_reasoning_calls_and_text(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    text = f"<think>hm</think>yes{COLOGNE}"
    ids = [*marked_ids(text), EOS]
    for size in (1, 3, 1000):
        answers(engine, text, size=size)
        body = {**WITH_TOOLS, "logprobs": True, "return_token_ids": True}
        (choice,) = whole(gateway, body)["choices"]
        assert choice["token_ids"] == ids
        assert len(choice["logprobs"]["content"]) == len(ids)
        events = [event["choices"][0] for event in stream(gateway, body)]
        assert [i for event in events for i in event.get("token_ids", [])] == ids
        result = [event["logprobs"]["content"] for event in events if event["logprobs"]]
        assert [item for items in result for item in items] == choice["logprobs"]["content"]


def thinks_for_ever(said: list[int]) -> list[int]:
    """Return the tokens that the model prefers, best first: "x" until the answer has more than
    fifty tokens, then EOS."""
    return [EOS if len(said) > 50 else ord("x"), *b'"}a:1{']


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": 7},
        {"thinking": {"type": "enabled", "budget_tokens": 7}},
        {"reasoning": {"max_tokens": 7}},
    ],
    ids=str,
)
@pytest.mark.parametrize("n", [1, 2])
def test_a_budget_ends_the_thinking_and_the_answer_goes_on(
    fields: dict[str, Any], n: int, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = Tasteful(thinks_for_ever)
    body = {"messages": HI, **ON["enable_thinking"], **fields, "n": n}
    answer = both(gateway, body)
    assert answer["reasoning"] == "x" * 7
    assert answer["content"] == "x" * 43
    assert answer["finish"] == "stop"
    usage = whole(gateway, body)["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 7 * n}


def test_a_budget_holds_before_a_form_and_before_a_call(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = Tasteful(thinks_for_ever)
    budget = {**ON["enable_thinking"], "thinking_token_budget": 7}
    answer = both(gateway, {**json_schema(SCHEMA), **budget})
    assert answer["reasoning"] == "x" * 7
    assert json.loads(answer["content"]).keys() == {"a"}
    answer = both(
        gateway, {**WITH_TOOLS, **budget, "tool_choice": "required", "parallel_tool_calls": False}
    )
    assert answer["reasoning"] == "x" * 7
    assert answer["warnings"] == []
    assert answer["calls"]


def test_a_budget_of_nothing_is_no_thinking(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = Tasteful(thinks_for_ever)
    body = {"messages": HI, "thinking_token_budget": 0, "return_effective_kwargs": True}
    answer = whole(gateway, body)
    assert answer["effective"] == {"chat_template_kwargs": {"enable_thinking": False}}
    assert answer["choices"][0]["message"]["reasoning"] is None
    response = gateway.post(CHAT, body | {"enable_thinking": True})
    assert "contradict" in error_of(response, 400)["message"]


def test_a_budget_without_a_reasoning_format_is_a_400(engine: ScriptedEngine) -> None:
    with GatewayProcess(engine=engine.address, reasoning_format="none") as plain:
        plain.await_ready()
        response = plain.post(CHAT, {"messages": HI, "thinking_token_budget": 5})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "thinking_token_budget")
        assert "--reasoning-format" in error["message"]
