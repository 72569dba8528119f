"""The JSON Schemas of messages and tools, for the OpenAPI document.

Decoding does not use these schemas. `prompt.content` and `openai.tools` check the values step by
step, so that an error can name the exact path. A decoder of unions could not name it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta

JsonSchemaDict = dict[str, Any]
TEXT_SCHEMA: JsonSchemaDict = {"type": "string"}


def object_schema(required: Sequence[str], **properties: JsonSchemaDict) -> JsonSchemaDict:
    return {"type": "object", "required": list(required), "properties": properties}


TOOL_NAME_SCHEMA: JsonSchemaDict = {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"}
PARAMETERS_SCHEMA: JsonSchemaDict = {
    "type": "object",
    "description": "A JSON Schema of type object.",
    "properties": {"type": {"const": "object"}},
}
_PART = object_schema(
    ["type", "text"], type={"enum": ["text", "input_text", "output_text"]}, text=TEXT_SCHEMA
)
_CONTENT = {"anyOf": [TEXT_SCHEMA, {"type": "array", "items": _PART, "minItems": 1}]}
_ARGUMENTS = {**TEXT_SCHEMA, "description": "The JSON text of an object."}
_CALLED = object_schema(["name", "arguments"], name=TEXT_SCHEMA, arguments=_ARGUMENTS)
_CALL = {
    "anyOf": [
        object_schema(
            ["id", "function"], id=TEXT_SCHEMA, type={"const": "function"}, function=_CALLED
        ),
        object_schema(
            ["id", "type", "custom"],
            id=TEXT_SCHEMA,
            type={"const": "custom"},
            custom=object_schema(["name", "input"], name=TEXT_SCHEMA, input=TEXT_SCHEMA),
        ),
    ]
}
_MESSAGE = {
    "title": "Message",
    "anyOf": [
        object_schema(
            ["role", "content"],
            role={"enum": ["system", "developer", "user"]},
            content=_CONTENT,
            name=TEXT_SCHEMA,
        ),
        object_schema(
            ["role"],
            role={"const": "assistant"},
            content={"anyOf": [*_CONTENT["anyOf"], {"type": "null"}]},
            reasoning={"type": ["string", "null"]},
            tool_calls={"type": "array", "items": _CALL},
        ),
        object_schema(
            ["role", "content"], role={"const": "tool"}, content=_CONTENT, tool_call_id=TEXT_SCHEMA
        ),
    ],
}
_FUNCTION = object_schema(
    ["name"],
    name=TOOL_NAME_SCHEMA,
    description=TEXT_SCHEMA,
    parameters=PARAMETERS_SCHEMA,
    strict={"type": ["boolean", "null"]},
)
GRAMMAR_SCHEMA = object_schema(
    ["syntax", "definition"], syntax={"enum": ["lark", "regex"]}, definition=TEXT_SCHEMA
)
_CUSTOM = object_schema(
    ["name"],
    name=TOOL_NAME_SCHEMA,
    description=TEXT_SCHEMA,
    format={
        "anyOf": [
            object_schema(["type"], type={"const": "text"}),
            object_schema(["type", "grammar"], type={"const": "grammar"}, grammar=GRAMMAR_SCHEMA),
        ]
    },
)
_TOOL = {
    "title": "Tool",
    "anyOf": [
        object_schema(["type", "function"], type={"const": "function"}, function=_FUNCTION),
        object_schema(["type", "custom"], type={"const": "custom"}, custom=_CUSTOM),
    ],
}
Message = Annotated[Any, Meta(extra_json_schema=_MESSAGE)]
"""An OpenAI message."""
Tool = Annotated[Any, Meta(extra_json_schema=_TOOL)]
"""An OpenAI tool."""
