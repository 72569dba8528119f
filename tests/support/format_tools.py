"""Tools with schemas for tests of formats. Formats that write values as text need the schemas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gateway.formats.event_builder import DeclaredTool
from gateway.formats.events import merged
from tests.support.formats import Call, Sample, dumps, lexicon, units


def tool(name: str, **properties: Any) -> DeclaredTool:
    return DeclaredTool(name, {"type": "object", "properties": properties})


STRING = {"type": "string"}
TYPED_TOOLS = (
    tool("get_weather", city=STRING, days={"type": "integer"}),
    tool("now", tz={"anyOf": [{"type": "string"}, {"type": "null"}]}),
    tool("f_1", a={"type": "object"}, n={"type": "number"}),
    tool("run", code=STRING, path=STRING, e=STRING),
    tool("types", i={"type": ["integer", "string"]}, b={"type": "boolean"}, z={}, l={"items": {}}),
)


def plain(value: Any) -> str:
    """Return a value as most templates write it: strings unchanged, everything else as JSON."""
    return value if isinstance(value, str) else dumps(value)


def lines(calls: Sequence[Call], write: Any) -> str:
    return "\n".join(write(call) for call in calls)


def arguments_of(events: Sequence[Any]) -> list[Any]:
    """Return the arguments of all calls, as values."""
    return [json.loads(e.fragment) for e in events if type(e).__name__ == "ToolArguments"]


def parsed_events(
    sample: Sample,
    text: str,
    *,
    tools: Sequence[DeclaredTool] | None = None,
    tokens: bool = True,
    inside: bool = False,
) -> list[Any]:
    """Return the merged events of a text that arrives unit by unit. Calls have the id "id"."""
    words = lexicon(sample, tokens=tokens)
    parser = sample.format.parser(words, tools=tools, new_id=lambda: "id", starts_inside=inside)
    events = [event for piece in units(text, words) for event in parser.push(piece)]
    return merged(events + parser.finish())
