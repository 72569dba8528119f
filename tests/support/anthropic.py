"""Parses and checks streams of Anthropic's API, and folds them into whole messages."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from gateway.api.anthropic.responses import MessageStart, StreamEvent


def anthropic_events(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, without comments. Checks that each event fits its struct, and
    that its SSE name equals its type."""
    frames = body.split(b"\n\n")
    assert frames.pop() == b"", "a stream ends with an empty line"
    events = []
    for frame in frames:
        if frame.startswith(b":"):
            continue
        name, data = frame.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        msgspec.convert(event, StreamEvent)
        events.append(event)
    return events


def prompt_tokens(usage: dict[str, Any]) -> int:
    """Return the number of all prompt tokens: those read from the cache, those written to it, and
    all others."""
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(usage[name] for name in names)


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole message that the events of a stream describe. Checks their order."""
    events = [event for event in events if event["type"] != "ping"]
    assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
    msgspec.convert(events[0], MessageStart)
    message: dict[str, Any] = events[0]["message"]
    assert message["content"] == []
    bits: list[str] | None = None  # of the open block
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert bits is None, "blocks do not overlap"
                assert event["index"] == len(message["content"]), "indexes rise by one"
                message["content"].append(event["content_block"])
                bits = []
            case "content_block_delta":
                assert bits is not None, "a delta outside a block"
                assert event["index"] == len(message["content"]) - 1
                _add(message["content"][-1], event["delta"], bits)
            case "content_block_stop":
                assert bits is not None
                assert event["index"] == len(message["content"]) - 1
                _close(message["content"][-1], "".join(bits))
                bits = None
            case kind:
                raise AssertionError(f"{kind} in the middle of a stream")
    assert bits is None, "the last block ends"
    last = events[-2]
    more = {"warnings": last["warnings"]} if "warnings" in last else {}
    usage = message["usage"] | last["usage"]
    for name, count in message["usage"].items():
        if not name.startswith("output_tokens"):
            assert usage[name] == count, "the start and the end agree about the input"
    return message | last["delta"] | {"usage": usage} | more


def _add(block: dict[str, Any], delta: dict[str, Any], bits: list[str]) -> None:
    kinds = {
        "text": ("text_delta", "text"),
        "thinking": ("thinking_delta", "thinking"),
        "tool_use": ("input_json_delta", "partial_json"),
    }
    if delta["type"] == "signature_delta":
        assert block["type"] == "thinking"
        block["signature"] = delta["signature"]
        return
    kind, member = kinds[block["type"]]
    assert delta["type"] == kind
    assert delta[member], "a delta is not empty"
    bits.append(delta[member])


def _close(block: dict[str, Any], text: str) -> None:
    if block["type"] == "tool_use":
        block["input"] = json.loads(text)
        assert isinstance(block["input"], dict)
    else:
        block[block["type"]] = text
