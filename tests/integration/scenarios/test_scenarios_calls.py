"""Scenarios of tool calls."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from protocol.engine.grammar import LiteralForm, Rules, forms_of
from protocol.engine.messages import Generate
from tests.support.gateway_process import GatewayProcess
from tests.support.http import error_of, fold_chat_stream
from tests.support.scenarios import (
    CHAT,
    COLOGNE,
    HI,
    TOOLS,
    WITH_TOOLS,
    Compiling,
    answers,
    both,
    call,
    stream,
    streamed,
    whole,
    without_ids,
)
from tests.support.scripted_engine import ScriptedEngine, TokenReply, marked_ids, text_reply


def test_4_three_answers_interleaved_token_by_token_are_each_as_if_alone(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    texts = {
        5: f"<think>one</think>First.\n{call('weather', {'city': 'A' * 40})}",
        6: call("now", {}) + call("weather", {"city": '</tool_call> "quoted"'}),
        7: "<think>three</think>No call at all, but <tool_call",
    }

    def by_seed(generate: Generate) -> TokenReply:
        return text_reply(texts[generate.params.seed or 0], marked=True)

    engine.script = by_seed
    engine.step_s = 0.004
    events = stream(gateway, {**WITH_TOOLS, "n": 3, "seed": 5})
    engine.step_s = 0.0005
    together = without_ids(fold_chat_stream(events))
    order = [event["choices"][0]["index"] for event in events]
    assert sum(a != b for a, b in itertools.pairwise(order)) > 50, "they interleave"
    for place, seed in enumerate(texts):
        assert together[place] == without_ids(streamed(gateway, {**WITH_TOOLS, "seed": seed}))[0]


def history(call_id: str | None, arguments: Any, answered: str | None) -> list[dict[str, Any]]:
    made: dict[str, Any] = {"type": "function", "function": {"name": "now", "arguments": arguments}}
    made |= {"id": call_id} if call_id else {}
    answer = {"role": "tool", "content": "12:00"} | ({"tool_call_id": answered} if answered else {})
    return [*HI, {"role": "assistant", "content": None, "tool_calls": [made]}, answer]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (history("a", 7, "a"), "messages[1].tool_calls[0].function.arguments"),
        (history("a", "{}", "b"), "messages[2].tool_call_id"),
        ([*HI, {"role": "assistant", "tool_calls": "none"}], "messages[1].tool_calls"),
        ([*HI, {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls[0].function"),
    ],
)
def test_13_a_malformed_history_is_a_400_that_names_the_place(
    messages: list[Any], param: str, gateway: GatewayProcess
) -> None:
    response = gateway.post(CHAT, {"messages": messages, "tools": TOOLS})
    assert error_of(response, 400)["param"] == param


def test_15_one_call_at_most_ends_the_generation_with_it(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.step_s = 0.02  # the answer takes 9 s, so it does not end before its abort
    answers(engine, COLOGNE + call("now", {}) * 50)
    body = {**WITH_TOOLS, "parallel_tool_calls": False}
    answer = both(gateway, body)
    assert answer["calls"] == [("weather", '{"city": "Köln"}')]
    assert answer["finish"] == "tool_calls"
    for generate in engine.generates:
        engine.await_abort(generate.request)
    usage = whole(gateway, body)["usage"]
    assert usage["completion_tokens"] <= len(marked_ids(COLOGNE))


def test_a_required_call_is_demanded_in_the_models_own_format(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = Compiling(COLOGNE)
    answer = both(gateway, {**WITH_TOOLS, "tool_choice": "required"})
    assert (answer["finish"], answer["warnings"]) == ("tool_calls", [])
    grammar = engine.generates[0].grammar
    assert grammar is not None
    assert isinstance(grammar.body, Rules)
    written = "".join(form.text for form in forms_of(grammar.body) if isinstance(form, LiteralForm))
    assert '{"name": "weather", "arguments": ' in written
