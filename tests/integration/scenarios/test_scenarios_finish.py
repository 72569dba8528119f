"""Scenarios of finish reasons, whole and streamed."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from protocol.engine.messages import Generate
from tests.support.gateway_process import GatewayProcess
from tests.support.http import fold_chat_stream
from tests.support.scenarios import COLOGNE, TRUTH, WITH_TOOLS, answers, both, stream, whole
from tests.support.scripted_engine import EOS, ScriptedEngine, TokenReply, marked_ids, text_reply


def test_6_a_required_call_that_is_not_made_is_a_stop_with_a_warning(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    answers(engine, "No, I will not.")
    body = {**WITH_TOOLS, "tool_choice": "required"}
    answer = both(gateway, body)
    assert (answer["finish"], answer["calls"]) == ("stop", [])
    assert answer["warnings"] == ["tool_choice_not_followed"]
    assert "tool_calls" not in whole(gateway, body)["choices"][0]["message"]


@pytest.mark.parametrize(("choice", "calls", "is_cut", "reason"), TRUTH)
def test_7_the_finish_reason_is_that_of_the_published_table(
    choice: str,
    calls: str,
    is_cut: bool,
    reason: str,
    engine: ScriptedEngine,
    gateway: GatewayProcess,
) -> None:
    answers(engine, (COLOGNE if calls == "one" else "") + " and more")
    tool_choice: Any = choice
    if choice == "named":
        tool_choice = {"type": "function", "function": {"name": "weather"}}
    body = {**WITH_TOOLS, "tool_choice": tool_choice}
    if is_cut:
        body["max_tokens"] = len(marked_ids(COLOGNE)) + 3 if calls == "one" else 3
    answer = both(gateway, body)
    assert answer["finish"] == reason
    assert len(answer["calls"]) == (calls == "one" and choice != "none")


def test_21_every_stream_ends_with_one_finish_a_choice_then_usage_then_done(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    """Many random streams run at once. `events_of` and `fold_chat_stream` check the order of
    events."""
    rng = random.Random(21)
    parts = ["text ", "<think>", "</think>", "<tool_call>", "</tool_call>", COLOGNE, "{", "\n"]
    lock = threading.Lock()

    def at_random(generate: Generate) -> TokenReply:
        with lock:
            text = "".join(rng.choices(parts, k=rng.randrange(6)))
            reply = text_reply(text, marked=True, size=rng.choice((1, 3, 50)))
            reply.finish = rng.choice(("stop", "length"))
        reply.stop_token = EOS if reply.finish == "stop" else None
        return reply

    engine.script = at_random
    options = {"stream_options": {"include_usage": True}}

    def run(place: int) -> None:
        n = 1 + place % 3
        events = stream(gateway, {**WITH_TOOLS, **options, "n": n})
        assert events.pop()["usage"]["completion_tokens"] >= 0
        choices = fold_chat_stream(events)
        assert len(choices) == n
        assert all(choice["finish"] for choice in choices.values())

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(run, range(300)))
