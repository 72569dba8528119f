"""`--reasoning-fields`: a chat message has its reasoning under one name only."""

from __future__ import annotations

import pytest

from tests.support.gateway_process import GatewayProcess
from tests.support.http import json_of
from tests.support.scenarios import CHAT, HI, ON, answers, stream
from tests.support.scripted_engine import ScriptedEngine, thinking_card

ENGINE = {"card": thinking_card()}
THOUGHT = "I think."


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_has_one_name(name: str, engine: ScriptedEngine) -> None:
    (other,) = {"reasoning", "reasoning_content"} - {name}
    body = {"messages": HI, **next(iter(ON.values()))}
    with GatewayProcess(engine=engine.address, reasoning_fields=name) as gateway:
        gateway.await_ready()
        answers(engine, f"{THOUGHT}\n</think>\n\nYes.")
        message = json_of(gateway.post(CHAT, body))["choices"][0]["message"]
        chunks = stream(gateway, body)
    assert (message[name], message["content"]) == (THOUGHT, "Yes.")
    assert other not in message
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get(name, "") for delta in deltas) == THOUGHT
    assert not any(other in delta for delta in deltas)
