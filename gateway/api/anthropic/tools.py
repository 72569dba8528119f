"""Translates Anthropic's tools and tool_choice into those of a chat.

Raises InvalidRequest naming the path. `openai.tools` checks what both APIs share: names, schemas,
and whether the chosen tool exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.api.anthropic.pieces import members_of, text_in, unexpected
from protocol.errors import InvalidRequest

CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    return [_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools)]


def _tool(tool: Any, at: str) -> dict[str, Any]:
    tool = members_of(tool, at)
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise InvalidRequest(
            f"{at}.type: must be 'custom' or absent; this server does not run Anthropic's own "
            f"tools such as {kind!r}",
            param=f"{at}.type",
        )
    schema = members_of(tool.get("input_schema"), f"{at}.input_schema")
    function = {"name": tool.get("name"), "parameters": schema}
    given = {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function | given}


def chat_tool_choice(choice: Any) -> tuple[str | dict[str, Any] | None, bool | None]:
    """Return (tool_choice, parallel_tool_calls) of a chat."""
    if choice is None:
        return None, None
    choice = members_of(choice, "tool_choice")
    kind = choice.get("type")
    alone = choice.get("disable_parallel_tool_use")
    if alone is not None and not isinstance(alone, bool):
        at = "tool_choice.disable_parallel_tool_use"
        raise InvalidRequest(f"{at}: must be true or false", param=at)
    parallel = None if alone is None else not alone
    if kind == "tool":
        name = text_in(choice, "name", "tool_choice")
        return {"type": "function", "function": {"name": name}}, parallel
    if not isinstance(kind, str) or kind not in CHOICES:
        raise unexpected(kind, "tool_choice", (*CHOICES, "tool"))
    return CHOICES[kind], parallel
