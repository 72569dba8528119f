"""Answers as events of the parser, for tests of streams without an engine and a socket."""

from __future__ import annotations

from gateway.formats.event_builder import INVALID_ARGUMENTS
from gateway.formats.events import (
    Content,
    Event,
    Finished,
    OutputWarning,
    Reasoning,
    ToolArguments,
    ToolCall,
    ToolCallEnd,
)

SCRIPTS: dict[str, list[Event]] = {
    "nothing": [Finished("stop")],
    "text": [Content("one "), Content("two"), Finished("stop")],
    "thinks, says, calls": [
        *(Reasoning("hm"), Reasoning(", so"), Content("I "), Content("look.")),
        *(ToolCall(0, "c0", "weather"), ToolArguments(0, '{"city": "K')),
        *(ToolArguments(0, 'öln"}'), ToolCallEnd(0)),
        *(ToolCall(1, "c1", "now"), ToolArguments(1, "{}"), ToolCallEnd(1)),
        Finished("tool_calls"),
    ],
    "thinks again": [Reasoning("a"), Content("b"), Reasoning("c"), Content("d"), Finished("stop")],
    "says after a call": [
        *(ToolCall(0, "c", "now"), ToolArguments(0, "{}"), ToolCallEnd(0)),
        *(Content("done"), Finished("tool_calls")),
    ],
    "cut off in thinking": [Reasoning("a"), Finished("length")],
    "cut off in a call": [
        *(ToolCall(0, "c", "now"), ToolArguments(0, '{"zone": "Eur'), Finished("length")),
    ],
    "cut off before the arguments": [ToolCall(0, "c", "now"), Finished("length")],
    "no JSON": [
        *(ToolCall(0, "c", "now"), ToolArguments(0, '{"zone": Eur'), ToolArguments(0, "ope}")),
        OutputWarning(INVALID_ARGUMENTS, "the arguments of call 0 are not a JSON object"),
        *(ToolCallEnd(0), Finished("tool_calls")),
    ],
    "a stop string": [Content("a"), Finished("stop", "END")],
    "a stop token": [Content("a"), Finished("stop", 7)],
    "aborted": [Content("a"), Finished("abort")],
    "odd characters": [Content('a"b\\c\n\u2028\x01</script>é'), Finished("stop")],
}
