"""Encodes a complete message from the blocks of the stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.api.anthropic.blocks import ContentBlocks, Kind
from gateway.api.anthropic.envelope import (
    AnthropicEnvelope,
    empty_block,
    encode,
    end_of,
    told_warnings,
    usage_at_start,
    usage_of,
)
from gateway.formats.events import Event, ToolCall
from gateway.generation.group import ChoiceGroup
from gateway.observe.timings import told_timings


class _Content:
    """Collects the blocks. The deltas of a block are joined when it ends."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._bits: list[str] = []

    def start(self, index: int, kind: Kind, call: ToolCall | None) -> None:
        self.blocks.append(empty_block(kind, call))
        self._bits = []

    def bit(self, text: str) -> None:
        self._bits.append(text)

    def stop(self, signature: str | None) -> None:
        block, text = self.blocks[-1], "".join(self._bits)
        if block["type"] == "tool_use":
            block["input"] = msgspec.Raw(text.encode())
        else:
            block[block["type"]] = text
        if signature is not None:
            block["signature"] = signature


def whole_message(answer: ChoiceGroup, events: Iterable[Event], origin: AnthropicEnvelope) -> bytes:
    """Return the body of a 200 for a group that ended without an error. `events` are all of its
    events."""
    content = _Content()
    blocks = ContentBlocks(content, shows_thinking=origin.shows_thinking)
    for event in events:
        blocks.say(event)
    assert blocks.finished is not None
    message = origin.message(
        content.blocks,
        end_of(blocks.finished, answer),
        usage_at_start(usage_of(answer, origin.block_tokens)),
    ) | told_warnings([*origin.warnings, *blocks.warnings])
    return encode(message | told_timings(answer))
