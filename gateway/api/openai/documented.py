"""The form of what a request may hold freely, for its documentation.

Requests are decoded without these: `chat.content` and `openai.tools` check such values piece by
piece and name the place of what is wrong, which a decoder of unions cannot.
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
                "arguments": {**_TEXT, "description": "A JSON object, as text."},
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
"""OpenAI's."""

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
                            "description": "A JSON schema, of an object.",
                            "properties": {"type": {"const": "object"}},
                        },
                        "strict": {"type": ["boolean", "null"]},
                    },
                },
            },
        }
    ),
]
"""OpenAI's."""
