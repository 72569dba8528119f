"""The lines of `tidegate status` about servers with several engines."""

from __future__ import annotations

from typing import Any

from tools.commands.status import describe_engine

STATE: dict[str, Any] = {
    "address": "ipc:///run/engine.sock",
    "ready": True,
    "why": None,
    "running": 2,
    "waiting": 1,
    "waiting_tokens": 300,
    "free_blocks": 70,
    "total_blocks": 100,
    "used_checkpoints": 0,
    "total_checkpoints": 0,
}


def test_an_engine_has_its_load_and_its_blocks() -> None:
    load = "replica  ipc:///run/engine.sock: 2 running, 1 waiting (300 tokens), "
    assert describe_engine("replica", STATE) == f"{load}30 of 100 blocks in use"
    states = STATE | {"used_checkpoints": 12, "total_checkpoints": 64}
    line = f"{load}30 of 100 blocks, 12 of 64 checkpoints in use"
    assert describe_engine("replica", states) == line


def test_an_engine_without_news_is_named_with_the_reason() -> None:
    lost = STATE | {"ready": False, "why": "the engine does not answer"}
    assert describe_engine("decode", lost).endswith(": not ready: the engine does not answer")
    assert describe_engine("a", {"state": "unloaded"}) == "a        unloaded"
    fresh = STATE | {"total_blocks": None}
    assert describe_engine("a", fresh) == "a        ipc:///run/engine.sock: ready"
