"""Scenarios of text: it must not depend on how its tokens are cut into deltas, have no broken
characters, and cost linear time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from protocol.engine.messages import Generate
from tests.support.gateway_process import GatewayProcess
from tests.support.scenarios import (
    COLOGNE,
    TOOLS,
    WITH_TOOLS,
    answers,
    both,
    call,
    streamed,
    user,
    whole,
    without_ids,
)
from tests.support.scripted_engine import ScriptedEngine, TokenReply, text_of, text_reply


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_1_however_the_tokens_are_cut_the_answer_is_the_same(
    size: int, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    text = f"<think>\nhm, {{}}\n</think>\n\nLet me see.\n\n{COLOGNE}\n{call('now', {})}"
    answers(engine, text, size=size)
    assert both(gateway, WITH_TOOLS) == {
        "content": "Let me see.",
        "reasoning": "hm, {}",
        "calls": [("weather", '{"city": "Köln"}'), ("now", "{}")],
        "finish": "tool_calls",
        "warnings": [],
    }


def test_22_many_different_calls_at_once_are_as_if_alone(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    def echo(generate: Generate) -> TokenReply:
        prompt = text_of(generate.prompt.tolist())
        return text_reply(f"<think>{len(prompt)}</think>{prompt[-30:]}", marked=True, size=5)

    engine.script = echo
    chats: list[Callable[[int], Any]] = [
        lambda i: without_ids(streamed(gateway, {"messages": [user(f"streamed {i}")]})),
        lambda i: without_ids(streamed(gateway, {**WITH_TOOLS, "messages": [user(f"tools {i}")]})),
        lambda i: whole(gateway, {"messages": [user(f"é {i}")], "max_tokens": 9})["choices"],
        lambda i: gateway.post("/tokenize", {"prompt": f"語 {i}"}).json(),
        lambda i: gateway.post("/tokenize", {"messages": [user(f"{i}")], "tools": TOOLS}).json(),
        lambda i: gateway.post("/detokenize", {"tokens": [65 + i % 26]}).json(),
    ]

    def run(place: int) -> Any:
        return chats[place % len(chats)](place)

    alone = [run(place) for place in range(200)]
    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(run, range(200))) == alone
