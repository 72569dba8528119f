"""Describes tools in the system message, for models whose chat template does not render tools.

The system message lists the tools and explains how to call one. Earlier calls and their results
become text in the same syntax. This is the syntax of the tool format `hermes`, so the calls in the
model's output can be parsed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

FORMATS = ("hermes", "qwen3_json")
"""Tool formats that parse calls in this syntax."""

_BEFORE = """# Tools

You may call one or more functions to help with the user's request. These are their signatures:
<tools>
"""
_AFTER = """
</tools>

To call one, answer with its name and arguments as JSON between tags:
<tool_call>
{"name": "function-name", "arguments": {"name": "value"}}
</tool_call>"""


def with_tool_prompt(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return `messages` with the tools, their calls and their results as text.

    The messages are OpenAI's. The caller has checked them, and their contents are strings.
    """
    plain = [_plain(message) for message in messages]
    prompt = _BEFORE + "\n".join(_json(tool) for tool in tools) + _AFTER
    first = plain[0] if plain else {}
    if first.get("role") in ("system", "developer") and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{prompt}"}, *plain[1:]]
    return [{"role": "system", "content": prompt}, *plain]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the message with its tool calls or tool result written into its text."""
    if message.get("role") in ("tool", "function"):
        result = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": result}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    content = message.get("content") or ""
    text = "\n".join([*([content] if content else []), *map(_call, calls)])
    return {name: value for name, value in message.items() if name != "tool_calls"} | {
        "content": text
    }


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else _json(arguments)
    return (
        f'<tool_call>\n{{"name": {_json(function["name"])}, "arguments": {written}}}\n</tool_call>'
    )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
