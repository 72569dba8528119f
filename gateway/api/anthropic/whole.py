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
    usage_at_start,
    usage_of,
    warnings_member,
)
from gateway.formats.events import Event, ToolCall
from gateway.generation.group import ChoiceGroup
from gateway.observe.timings import told_timings


class _Content:
    """Collects the blocks. The deltas of a block are joined when it ends."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._deltas: list[str] = []

    def start(self, index: int, kind: Kind, call: ToolCall | None) -> None:
        self.blocks.append(empty_block(kind, call))
        self._deltas = []

    def block_delta(self, text: str) -> None:
        self._deltas.append(text)

    def stop(self, signature: str | None) -> None:
        block, text = self.blocks[-1], "".join(self._deltas)
        if block["type"] == "tool_use":
            block["input"] = msgspec.Raw(text.encode())
        else:
            block[block["type"]] = text
        if signature is not None:
            block["signature"] = signature


def whole_message(
    group: ChoiceGroup, events: Iterable[Event], envelope: AnthropicEnvelope
) -> bytes:
    """Return the body of a 200 for a group that ended without an error. `events` are all of its
    events."""
    content = _Content()
    blocks = ContentBlocks(content, shows_thinking=envelope.shows_thinking)
    for event in events:
        blocks.push(event)
    assert blocks.finished is not None
    message = envelope.message(
        content.blocks,
        end_of(blocks.finished, group),
        usage_at_start(usage_of(group, envelope.block_tokens)),
    ) | warnings_member([*envelope.warnings, *blocks.warnings])
    return encode(message | told_timings(group))
