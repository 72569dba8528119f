"""JSON Schemas of items and tools, for the OpenAPI document.

Decoding does not use them. `items` and `translate` check these values step by step, so that an
error can name the exact path; a decoder of unions cannot.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

_TEXT = {"type": "string"}
_NULLABLE = {"type": ["string", "null"]}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["input_text", "output_text", "text"]}, "text": _TEXT},
}
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": _PART, "minItems": 1}]}


def _item(kind: str, required: list[str], **properties: Any) -> dict[str, Any]:
    members = {"type": {"const": kind}, "id": _NULLABLE, **properties}
    return {"type": "object", "required": ["type", *required], "properties": members}


_REASONING_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["reasoning_text"]}, "text": _TEXT},
}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": _CONTENT,
    },
}

Item = Annotated[
    Any,
    Meta(
        extra_json_schema={
            "title": "InputItem",
            "anyOf": [
                _MESSAGE,
                _item(
                    "function_call",
                    ["call_id", "name", "arguments"],
                    call_id=_TEXT,
                    name=_TEXT,
                    arguments={**_TEXT, "description": "The JSON text of an object."},
                ),
                _item(
                    "function_call_output", ["call_id", "output"], call_id=_TEXT, output=_CONTENT
                ),
                _item(
                    "reasoning",
                    [],
                    content={"type": ["array", "null"], "items": _REASONING_PART},
                    encrypted_content=_NULLABLE,
                ),
                _item("item_reference", ["id"], id=_TEXT),
            ],
        }
    ),
]
"""An OpenAI input item."""

Tool = Annotated[
    Any,
    Meta(
        extra_json_schema={
            "title": "FunctionTool",
            "type": "object",
            "required": ["type", "name"],
            "properties": {
                "type": {"const": "function"},
                "name": {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"},
                "description": _NULLABLE,
                "parameters": {
                    "type": ["object", "null"],
                    "description": "A JSON Schema of type object.",
                    "properties": {"type": {"const": "object"}},
                },
                "strict": {"type": ["boolean", "null"]},
            },
        }
    ),
]
"""An OpenAI function tool."""
