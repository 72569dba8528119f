"""Calls in a conversation that Anthropic's service executed, with their results.

Such a call (`server_tool_use`, `mcp_tool_use`) and its result (`web_search_tool_result` and others)
are in one turn of the assistant, which another server has answered. The model reads them as a call
and a result of any other tool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.prompt.content import to_json

CALLS = ("server_tool_use", "mcp_tool_use")
RESULTS = (
    *("web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
    *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result"),
    *("tool_search_tool_result", "mcp_tool_result", "advisor_tool_result"),
)
NO_RESULT = "The result is not part of this conversation."
_UNREADABLE = ("type", "citations", "caller", "page_age")
"""Members of a result that say nothing to a model."""


def service_result(content: Any) -> str:
    """Return the text of a result's `content`, whatever its form is: a text, blocks of text, or
    objects, whose members that are encrypted are left out."""
    if isinstance(content, str):
        return content or NO_RESULT
    blocks = [content] if isinstance(content, Mapping) else content
    if not isinstance(blocks, Sequence):
        return NO_RESULT
    return "\n".join(filter(None, map(_block_text, blocks))) or NO_RESULT


def tool_references(content: Any) -> list[str]:
    """Return the names of the tools that the result of a search for tools names."""
    found = content.get("tool_references") if isinstance(content, Mapping) else None
    listed = found if isinstance(found, list) else []
    names = [each.get("tool_name") for each in listed if isinstance(each, Mapping)]
    return [name for name in names if isinstance(name, str)]


def _block_text(block: Any) -> str:
    if not isinstance(block, Mapping):
        return ""
    if "error_code" in block:
        return f"Error: {block['error_code']}"
    text = block.get("text")
    if isinstance(text, str):
        return text
    readable = _readable(block)
    return to_json(readable) if readable else ""


def _readable(value: Any) -> Any:
    """Return a value without members that are empty or that no model can read."""
    if isinstance(value, Mapping):
        members = {name: _readable(each) for name, each in value.items() if _is_readable(name)}
        return {name: each for name, each in members.items() if each not in (None, "", [], {})}
    if isinstance(value, list):
        return [_readable(each) for each in value]
    return value


def _is_readable(name: str) -> bool:
    return name not in _UNREADABLE and not name.startswith("encrypted")
