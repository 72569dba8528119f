"""Tools for models whose chat template has no place for them: said in words, as messages.

The model is told in its system message which tools there are and how to call one; calls and their
results in the history become text in the same form. The form is that of the tool format `hermes`,
by which such a model's answers are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

FORMATS = ("hermes", "qwen3_json")
"""Tool formats that read what is taught here."""

_BEFORE = """# Tools

You may call one or more functions to help with the user's request. These are their signatures:
<tools>
"""
_BEHIND = """
</tools>

To call one, answer with its name and arguments as JSON between tags:
<tool_call>
{"name": "function-name", "arguments": {"name": "value"}}
</tool_call>"""


def taught(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """OpenAI's messages, with nothing in them that a template must know of tools. Messages are as
    they came: what is wrong with them is for the template's side to say."""
    told = [_plain(message) for message in messages]
    lesson = _BEFORE + "\n".join(_json(tool) for tool in tools) + _BEHIND
    first = told[0] if told else {}
    if first.get("role") in ("system", "developer") and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{lesson}"}, *told[1:]]
    return [{"role": "system", "content": lesson}, *told]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
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
