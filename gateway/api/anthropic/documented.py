"""JSON Schemas of messages and tools, for the OpenAPI document.

Decoding does not use them. `conversation` and `tools` check these values step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta

_Schema = dict[str, Any]
_TEXT: _Schema = {"type": "string"}


def _block(kind: str, **members: _Schema) -> _Schema:
    return {
        "type": "object",
        "required": ["type", *members],
        "properties": {"type": {"const": kind}, **members},
    }


def _content(blocks: Sequence[_Schema]) -> _Schema:
    return {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": list(blocks)}}]}


_TEXT_BLOCK = _block("text", text=_TEXT)
_SOURCE = {
    "anyOf": [_block("text", data=_TEXT), _block("content", content=_content([_TEXT_BLOCK]))]
}
_READABLE = [
    _TEXT_BLOCK,
    _block("document", source=_SOURCE),
    _block(
        "search_result",
        title=_TEXT,
        source=_TEXT,
        content={"type": "array", "items": _TEXT_BLOCK},
    ),
]
_RESULT = _block("tool_result", tool_use_id=_TEXT)
_RESULT["properties"] |= {"content": _content(_READABLE), "is_error": {"type": "boolean"}}
_USE = _block("tool_use", id=_TEXT, name=_TEXT, input={"type": "object"})
_THINKING = _block("thinking", thinking=_TEXT)
_THINKING["properties"] |= {"signature": _TEXT}
_REDACTED = _block("redacted_thinking", data=_TEXT)


def _turn(role: str, content: _Schema) -> _Schema:
    return {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"const": role}, "content": content},
    }


Message = Annotated[
    Any,
    Meta(
        extra_json_schema={
            "title": "AnthropicMessage",
            "anyOf": [
                _turn("user", _content([*_READABLE, _RESULT])),
                _turn("assistant", _content([_TEXT_BLOCK, _THINKING, _REDACTED, _USE])),
                _turn("system", _content([_TEXT_BLOCK])),
            ],
        }
    ),
]
System = Annotated[Any, Meta(extra_json_schema=_content([_TEXT_BLOCK]))]
Tool = Annotated[
    Any,
    Meta(
        extra_json_schema={
            "title": "AnthropicTool",
            "type": "object",
            "required": ["name", "input_schema"],
            "properties": {
                "type": {"anyOf": [{"const": "custom"}, {"type": "null"}]},
                "name": {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"},
                "description": _TEXT,
                "input_schema": {
                    "type": "object",
                    "description": "A JSON Schema of type object.",
                    "properties": {"type": {"const": "object"}},
                },
                "strict": {"type": ["boolean", "null"]},
            },
        }
    ),
]
ToolChoice = Annotated[
    Any,
    Meta(
        extra_json_schema={
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": ["auto", "any", "tool", "none"]},
                "name": _TEXT,
                "disable_parallel_tool_use": {"type": "boolean"},
            },
        }
    ),
]
Thinking = Annotated[
    Any,
    Meta(
        extra_json_schema={
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": ["enabled", "disabled", "adaptive"]},
                "budget_tokens": {"type": "integer", "minimum": 0},
                "display": {"enum": ["summarized", "omitted"]},
            },
        }
    ),
]
