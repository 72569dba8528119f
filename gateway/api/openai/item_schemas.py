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


def member(about: str, schema: JsonSchemaDict = TEXT_SCHEMA) -> JsonSchemaDict:
    """Return the schema of a member with the sentence that the reference shows."""
    return {**schema, "description": about}


TOOL_NAME_SCHEMA = member(
    "Name of the tool, which no other tool of the request has.",
    {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"},
)
TOOL_ABOUT_SCHEMA = member("What the tool does, and when to call it: the model reads this.")
PARAMETERS_SCHEMA: JsonSchemaDict = {
    "type": "object",
    "description": "A JSON Schema of type object.",
    "properties": {"type": {"const": "object"}},
}
STRICT_SCHEMA = member(
    "Whether the arguments must match the schema. Default: false.", {"type": ["boolean", "null"]}
)
ARGUMENTS_SCHEMA = member("The JSON text of an object.")
CALL_ID_SCHEMA = member("Id of the call, which the message with its result repeats.")
CALLED_NAME_SCHEMA = member("Name of the tool that the model has called.")
REASONING_SCHEMA = member(
    "What the model thought before it answered, as a response returned it.",
    {"type": ["string", "null"]},
)
PART_TEXT_SCHEMA = member("The text of this part.")


def part_schema(*kinds: str) -> JsonSchemaDict:
    """Return the schema of a part of a text."""
    kind = member("What the part is: a text, by any of these names.", {"enum": list(kinds)})
    return object_schema(["type", "text"], type=kind, text=PART_TEXT_SCHEMA)


def content_schema(about: str, part: JsonSchemaDict, *others: JsonSchemaDict) -> JsonSchemaDict:
    """Return the schema of a text or a list of its parts, or of one of the other values."""
    parts = {"type": "array", "items": part, "minItems": 1}
    return {"anyOf": [TEXT_SCHEMA, parts, *others], "description": about}


_PART = part_schema("text", "input_text", "output_text")
_CONTENT = content_schema("The text of the message, or a list of its parts.", _PART)
_CALLED = object_schema(["name", "arguments"], name=CALLED_NAME_SCHEMA, arguments=ARGUMENTS_SCHEMA)
_CALL = {
    "anyOf": [
        object_schema(
            ["id", "function"],
            id=CALL_ID_SCHEMA,
            type={"const": "function"},
            function=member("The call of a function.", _CALLED),
        ),
        object_schema(
            ["id", "type", "custom"],
            id=CALL_ID_SCHEMA,
            type={"const": "custom"},
            custom=member(
                "The call of a tool whose input is a text.",
                object_schema(
                    ["name", "input"],
                    name=CALLED_NAME_SCHEMA,
                    input=member("The text that the model wrote for the tool."),
                ),
            ),
        ),
    ]
}
_MESSAGE = {
    "title": "Message",
    "anyOf": [
        object_schema(
            ["role", "content"],
            role=member(
                "Who speaks. A developer message is a system message.",
                {"enum": ["system", "developer", "user"]},
            ),
            content=_CONTENT,
            name=member("Name of the speaker, for templates that show it."),
        ),
        object_schema(
            ["role"],
            role={"const": "assistant"},
            content=content_schema(
                "The text of the answer, or a list of its parts. Null: it has tool calls only.",
                _PART,
                {"type": "null"},
            ),
            reasoning=REASONING_SCHEMA,
            tool_calls=member(
                "The tools that the model called in this answer.",
                {"type": "array", "items": _CALL},
            ),
        ),
        object_schema(
            ["role", "content"],
            role={"const": "tool"},
            content=content_schema("What the tool returned: a text, or a list of parts.", _PART),
            tool_call_id=member("Id of the call that this message answers."),
        ),
    ],
}
_FUNCTION = object_schema(
    ["name"],
    name=TOOL_NAME_SCHEMA,
    description=TOOL_ABOUT_SCHEMA,
    parameters=PARAMETERS_SCHEMA,
    strict=STRICT_SCHEMA,
)
GRAMMAR_SCHEMA = object_schema(
    ["syntax", "definition"],
    syntax=member("The language of the definition.", {"enum": ["lark", "regex"]}),
    definition=member("The grammar, or the regular expression, that the text must match."),
)
_CUSTOM = object_schema(
    ["name"],
    name=TOOL_NAME_SCHEMA,
    description=TOOL_ABOUT_SCHEMA,
    format={
        "description": "What the input of the tool may be. Default: any text.",
        "anyOf": [
            object_schema(["type"], type={"const": "text"}),
            object_schema(
                ["type", "grammar"],
                type={"const": "grammar"},
                grammar=member("What the input must match.", GRAMMAR_SCHEMA),
            ),
        ],
    },
)
_TOOL = {
    "title": "Tool",
    "anyOf": [
        object_schema(
            ["type", "function"],
            type={"const": "function"},
            function=member("A function, whose arguments are an object.", _FUNCTION),
        ),
        object_schema(
            ["type", "custom"],
            type={"const": "custom"},
            custom=member("A tool whose input is a text.", _CUSTOM),
        ),
    ],
}
Message = Annotated[Any, Meta(extra_json_schema=_MESSAGE)]
"""An OpenAI message."""
Tool = Annotated[Any, Meta(extra_json_schema=_TOOL)]
"""An OpenAI tool."""
