"""Request bodies of /v1/messages: field types and bounds.

- Fields that Anthropic does not define have the names and bounds of `openai.requests`.
- `messages`, `system`, `tools` and other values with alternatives are `Any` here. `conversation`
  and `translate` check them step by step, so that an error can name the exact path.
- Unknown fields have no effect. The response lists them in `ignored_params`, or the request is
  refused if it sets `strict_params`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from gateway.api.openai.item_schemas import (
    PARAMETERS_SCHEMA,
    TEXT_SCHEMA,
    TOOL_NAME_SCHEMA,
    JsonSchemaDict,
    object_schema,
)
from gateway.api.openai.requests import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CacheSalt,
    ChatBody,
    FormFields,
    Object,
    Priority,
    StopString,
    Timeout,
)
from gateway.http.text_fields import Name, TemplateText
from gateway.text.stop import MAX_STOP_STRINGS
from protocol.engine.sampling import MaxTokens

# ---- JSON Schemas of values that `conversation` and `translate` check, for the OpenAPI document

_FLAG: JsonSchemaDict = {"type": "boolean"}


def _block(
    kind: str, optional: Mapping[str, JsonSchemaDict] | None = None, **members: JsonSchemaDict
) -> JsonSchemaDict:
    """Return the schema of a content block. `members` are required, `optional` ones are not."""
    return object_schema(["type", *members], type={"const": kind}, **members, **(optional or {}))


def _content(*blocks: JsonSchemaDict) -> JsonSchemaDict:
    return {"anyOf": [TEXT_SCHEMA, {"type": "array", "items": {"anyOf": list(blocks)}}]}


def _turn(role: str, *blocks: JsonSchemaDict) -> JsonSchemaDict:
    return object_schema(["role", "content"], role={"const": role}, content=_content(*blocks))


_TEXT_BLOCK = _block("text", text=TEXT_SCHEMA)
_SOURCE = {
    "anyOf": [_block("text", data=TEXT_SCHEMA), _block("content", content=_content(_TEXT_BLOCK))]
}
_READABLE = (
    _TEXT_BLOCK,
    _block("document", source=_SOURCE),
    _block(
        "search_result",
        title=TEXT_SCHEMA,
        source=TEXT_SCHEMA,
        content={"type": "array", "items": _TEXT_BLOCK},
    ),
)
_IN_RESULT = (*_READABLE, _block("tool_reference", tool_name=TEXT_SCHEMA))
_TOOL_RESULT = _block(
    "tool_result", {"content": _content(*_IN_RESULT), "is_error": _FLAG}, tool_use_id=TEXT_SCHEMA
)
_FROM_ASSISTANT = (
    _TEXT_BLOCK,
    _block("thinking", {"signature": TEXT_SCHEMA}, thinking=TEXT_SCHEMA),
    _block("redacted_thinking", data=TEXT_SCHEMA),
    _block("tool_use", id=TEXT_SCHEMA, name=TEXT_SCHEMA, input={"type": "object"}),
)
_MESSAGE = {
    "title": "AnthropicMessage",
    "anyOf": [
        _turn("user", *_READABLE, _TOOL_RESULT),
        _turn("assistant", *_FROM_ASSISTANT),
        _turn(
            "system",
            _TEXT_BLOCK,
            _block("tool_addition", tool=_block("tool_reference", name=TEXT_SCHEMA)),
            _block("tool_removal", tool=_block("tool_reference", name=TEXT_SCHEMA)),
        ),
    ],
}
_TOOL = {"title": "AnthropicTool"} | object_schema(
    ["name", "input_schema"],
    type={"anyOf": [{"const": "custom"}, {"type": "null"}]},
    name=TOOL_NAME_SCHEMA,
    description=TEXT_SCHEMA,
    input_schema=PARAMETERS_SCHEMA,
    strict={"type": ["boolean", "null"]},
    defer_loading={"type": ["boolean", "null"]},
)
_TOOL_CHOICE = object_schema(
    ["type"],
    type={"enum": ["auto", "any", "tool", "none"]},
    name=TEXT_SCHEMA,
    disable_parallel_tool_use=_FLAG,
)
_THINKING = object_schema(
    ["type"],
    type={"enum": ["enabled", "disabled", "adaptive"]},
    budget_tokens={"type": "integer", "minimum": 0},
    display={"enum": ["summarized", "omitted", "updates"]},
)

Message = Annotated[Any, Meta(extra_json_schema=_MESSAGE)]
System = Annotated[Any, Meta(extra_json_schema=_content(_TEXT_BLOCK))]
Tool = Annotated[Any, Meta(extra_json_schema=_TOOL)]
ToolChoice = Annotated[Any, Meta(extra_json_schema=_TOOL_CHOICE)]
Thinking = Annotated[Any, Meta(extra_json_schema=_THINKING)]


# ---- bodies


class CountBody(FormFields, frozen=True, kw_only=True):
    """A message whose tokens are counted. Fields about the answer have no effect.

    messages        the turns so far, oldest first. If the last one is the assistant's, the answer
                    continues it. Example: [{"role": "user", "content": "Hello!"}]
    system          the system message, as a text or as blocks of text
    max_tokens      most tokens of the answer
    stop_sequences  texts that end the answer. Example: ["\\n\\n"]
    tools           the tools that the model may use, with a JSON Schema of their input
    tool_choice     whether the model must use a tool. Default: auto. Example: {"type": "any"}
    thinking        whether the model thinks before it answers. Default: the model's.
                    Example: {"type": "enabled", "budget_tokens": 1024}
    output_config   how much the model thinks, and the form of the answer.
                    Example: {"effort": "low"}
    output_format   older spelling of `output_config.format`
    cache_control, metadata, service_tier   without effect
    container, mcp_servers                  without effect; listed in `ignored_params`
    thread          not supported; refused if set
    """

    described_like: ClassVar = ChatBody

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: Name | None = None
    system: System | None = None
    max_tokens: MaxTokens | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: Any = None
    output_format: Any = None
    metadata: Any = None
    service_tier: Any = None
    cache_control: Any = None
    container: Any = None
    mcp_servers: Any = None
    thread: Any = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    timeout_s: Timeout | None = None
    queue_timeout_s: Timeout | None = None
    chat_template: TemplateText | None = None
    chat_template_kwargs: Object | None = None
    documents: Annotated[list[Object], Meta(max_length=MAX_TOOLS)] | None = None
    enable_thinking: Any = None
    thinking_token_budget: Any = None
    include_reasoning: bool | None = None
    return_effective_kwargs: bool | None = None
    strict_params: bool | None = None
    timings: bool | None = None


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """Messages to answer, and how."""

    max_tokens: MaxTokens
