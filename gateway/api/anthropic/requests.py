"""Request bodies of /v1/messages: field types and bounds.

- Fields that Anthropic does not define have the names and bounds of `openai.requests`.
- `messages`, `system`, `tools` and other values with alternatives are `Any` here. `conversation`
  and `translate` check them step by step, so that an error can name the exact path.
- Unknown fields have no effect. The response lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta

from gateway.api.openai.requests import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CacheSalt,
    FormFields,
    Object,
    Priority,
    StopString,
    Timeout,
)
from gateway.text.stop import MAX_STOP_STRINGS
from protocol.sampling import MaxTokens

# ---- JSON Schemas of values that `conversation` and `translate` check, for the OpenAPI document

_Schema = dict[str, Any]
_TEXT: _Schema = {"type": "string"}
_FLAG: _Schema = {"type": "boolean"}


def _object(required: Sequence[str], **properties: _Schema) -> _Schema:
    return {"type": "object", "required": list(required), "properties": properties}


def _block(kind: str, optional: Mapping[str, _Schema] | None = None, **members: _Schema) -> _Schema:
    """Return the schema of a content block with these required members."""
    return _object(["type", *members], type={"const": kind}, **members, **(optional or {}))


def _content(*blocks: _Schema) -> _Schema:
    return {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": list(blocks)}}]}


def _turn(role: str, *blocks: _Schema) -> _Schema:
    return _object(["role", "content"], role={"const": role}, content=_content(*blocks))


_TEXT_BLOCK = _block("text", text=_TEXT)
_SOURCE = {"anyOf": [_block("text", data=_TEXT), _block("content", content=_content(_TEXT_BLOCK))]}
_READABLE = (
    _TEXT_BLOCK,
    _block("document", source=_SOURCE),
    _block(
        "search_result", title=_TEXT, source=_TEXT, content={"type": "array", "items": _TEXT_BLOCK}
    ),
)
_TOOL_RESULT = _block(
    "tool_result", {"content": _content(*_READABLE), "is_error": _FLAG}, tool_use_id=_TEXT
)
_FROM_ASSISTANT = (
    _TEXT_BLOCK,
    _block("thinking", {"signature": _TEXT}, thinking=_TEXT),
    _block("redacted_thinking", data=_TEXT),
    _block("tool_use", id=_TEXT, name=_TEXT, input={"type": "object"}),
)
_MESSAGE = {
    "title": "AnthropicMessage",
    "anyOf": [
        _turn("user", *_READABLE, _TOOL_RESULT),
        _turn("assistant", *_FROM_ASSISTANT),
        _turn("system", _TEXT_BLOCK),
    ],
}
_TOOL = {"title": "AnthropicTool"} | _object(
    ["name", "input_schema"],
    type={"anyOf": [{"const": "custom"}, {"type": "null"}]},
    name={"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"},
    description=_TEXT,
    input_schema={
        "type": "object",
        "description": "A JSON Schema of type object.",
        "properties": {"type": {"const": "object"}},
    },
    strict={"type": ["boolean", "null"]},
)
_TOOL_CHOICE = _object(
    ["type"],
    type={"enum": ["auto", "any", "tool", "none"]},
    name=_TEXT,
    disable_parallel_tool_use=_FLAG,
)
_THINKING = _object(
    ["type"],
    type={"enum": ["enabled", "disabled", "adaptive"]},
    budget_tokens={"type": "integer", "minimum": 0},
    display={"enum": ["summarized", "omitted"]},
)

Message = Annotated[Any, Meta(extra_json_schema=_MESSAGE)]
System = Annotated[Any, Meta(extra_json_schema=_content(_TEXT_BLOCK))]
Tool = Annotated[Any, Meta(extra_json_schema=_TOOL)]
ToolChoice = Annotated[Any, Meta(extra_json_schema=_TOOL_CHOICE)]
Thinking = Annotated[Any, Meta(extra_json_schema=_THINKING)]


# ---- bodies


class CountBody(FormFields, frozen=True, kw_only=True):
    """The body of POST /v1/messages/count_tokens. Fields about the answer have no effect.

    cache_control, metadata, service_tier   accepted without effect
    container, mcp_servers                  not supported; refused if set
    output_config                           {"effort": ..., "format": {"type": "json_schema", ...}}
    output_format                           older spelling of `output_config.format`
    return_effective_kwargs                 include the arguments that the chat template received
    strict_params                           refuse fields that have no effect
    timings                                 include how long each stage took
    """

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
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
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    timeout_s: Timeout | None = None
    queue_timeout_s: Timeout | None = None
    chat_template: str | None = None
    chat_template_kwargs: Object | None = None
    documents: Annotated[list[Object], Meta(max_length=MAX_TOOLS)] | None = None
    enable_thinking: Any = None
    thinking_token_budget: Any = None
    include_reasoning: bool | None = None
    return_effective_kwargs: bool | None = None
    strict_params: bool | None = None
    timings: bool | None = None


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: MaxTokens
