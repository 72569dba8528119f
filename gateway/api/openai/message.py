"""Builds the assistant message that the events of one choice add up to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.formats.events import (
    Content,
    Event,
    Finished,
    OutputWarning,
    Reasoning,
    ToolArguments,
    ToolCall,
)


class MessageBuilder(msgspec.Struct):
    """An assistant message. `calls` includes a call that was cut off, as it does in a stream."""

    text: str
    reasoning: str
    calls: list[dict[str, Any]]
    warnings: list[OutputWarning]
    end: Finished


def message_of(events: Iterable[Event]) -> MessageBuilder:
    """Return the message of a complete choice that has not failed. Takes linear time."""
    text: list[str] = []
    reasoning: list[str] = []
    heads: list[ToolCall] = []
    arguments: list[list[str]] = []
    warnings: list[OutputWarning] = []
    end: Finished | None = None
    for event in events:
        match event:
            case Content(bit):
                text.append(bit)
            case Reasoning(bit):
                reasoning.append(bit)
            case ToolCall():
                heads.append(event)
                arguments.append([])
            case ToolArguments(index, bit):
                arguments[index].append(bit)
            case OutputWarning():
                warnings.append(event)
            case Finished():
                end = event
    assert end is not None
    calls = [call_of(head, "".join(bits)) for head, bits in zip(heads, arguments, strict=True)]
    return MessageBuilder("".join(text), "".join(reasoning), calls, warnings, end)


def call_of(call: ToolCall, arguments: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def warning_of(warning: OutputWarning, choice: int | None) -> dict[str, Any]:
    """Return the JSON of a warning. `choice` is None if the warning is about the request."""
    return {"code": warning.code, "message": warning.message, "choice": choice}
