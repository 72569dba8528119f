"""JSON Schemas of messages and tools, for the OpenAPI document.

Decoding does not use them. `prompt.content` and `openai.tools` check these values step by step, so
that an error can name the exact path; a decoder of unions cannot.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

_TEXT = {"type": "string"}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": _TEXT},
}
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": _PART, "minItems": 1}]}
_CALL = {
    "type": "object",
    "required": ["id", "function"],
    "properties": {
        "id": _TEXT,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {
                "name": _TEXT,
                "arguments": {**_TEXT, "description": "The JSON text of an object."},
            },
        },
    },
}

Message = Annotated[
    Any,
    Meta(
        extra_json_schema={
            "title": "Message",
            "anyOf": [
                {
                    "type": "object",
                    "required": ["role", "content"],
                    "properties": {
                        "role": {"enum": ["system", "developer", "user"]},
                        "content": _CONTENT,
                        "name": _TEXT,
                    },
                },
                {
                    "type": "object",
                    "required": ["role"],
                    "properties": {
                        "role": {"const": "assistant"},
                        "content": {"anyOf": [*_CONTENT["anyOf"], {"type": "null"}]},
                        "reasoning": {"type": ["string", "null"]},
                        "tool_calls": {"type": "array", "items": _CALL},
                    },
                },
                {
                    "type": "object",
                    "required": ["role", "content"],
                    "properties": {
                        "role": {"const": "tool"},
                        "content": _CONTENT,
                        "tool_call_id": _TEXT,
                    },
                },
            ],
        }
    ),
]
"""An OpenAI message."""

Tool = Annotated[
    Any,
    Meta(
        extra_json_schema={
            "title": "Tool",
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"},
                        "description": _TEXT,
                        "parameters": {
                            "type": "object",
                            "description": "A JSON Schema of type object.",
                            "properties": {"type": {"const": "object"}},
                        },
                        "strict": {"type": ["boolean", "null"]},
                    },
                },
            },
        }
    ),
]
"""An OpenAI tool."""
