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
    CALLED_NAME_SCHEMA,
    PARAMETERS_SCHEMA,
    STRICT_SCHEMA,
    TEXT_SCHEMA,
    TOOL_ABOUT_SCHEMA,
    TOOL_NAME_SCHEMA,
    JsonSchemaDict,
    member,
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
_TURN = "The text of the message, or a list of its blocks."


def _block(
    kind: str, optional: Mapping[str, JsonSchemaDict] | None = None, **members: JsonSchemaDict
) -> JsonSchemaDict:
    """Return the schema of a content block. `members` are required, `optional` ones are not."""
    return object_schema(["type", *members], type={"const": kind}, **members, **(optional or {}))


def _content(about: str, *blocks: JsonSchemaDict) -> JsonSchemaDict:
    """Return the schema of a text or a list of blocks."""
    lists = {"type": "array", "items": {"anyOf": list(blocks)}}
    return {"anyOf": [TEXT_SCHEMA, lists], "description": about}


def _turn(role: str, *blocks: JsonSchemaDict) -> JsonSchemaDict:
    content = _content(_TURN, *blocks)
    return object_schema(["role", "content"], role={"const": role}, content=content)


_TEXT_BLOCK = _block("text", text=member("The text of this block."))
_SOURCE = {
    "description": "The text of the document, or its blocks.",
    "anyOf": [
        _block("text", data=member("The text of the document.")),
        _block(
            "content", content=_content("The text of the document, or its blocks.", _TEXT_BLOCK)
        ),
    ],
}
_READABLE = (
    _TEXT_BLOCK,
    _block("document", source=_SOURCE),
    _block(
        "search_result",
        title=member("Title of the page or file that was found."),
        source=member("Address of the page, or name of the file."),
        content=member("What was found.", {"type": "array", "items": _TEXT_BLOCK}),
    ),
)
_REFERENCE = member("Name of a tool that was declared with `defer_loading`.")
_IN_RESULT = (*_READABLE, _block("tool_reference", tool_name=_REFERENCE))
_TOOL_RESULT = _block(
    "tool_result",
    {
        "content": _content("What the tool returned: a text, or a list of blocks.", *_IN_RESULT),
        "is_error": member("Whether the tool failed. Default: false.", _FLAG),
    },
    tool_use_id=member("Id of the call that this block answers."),
)
_SIGNATURE = member("The signature of the block, as the response had it.")
_FROM_ASSISTANT = (
    _TEXT_BLOCK,
    _block(
        "thinking",
        {"signature": _SIGNATURE},
        thinking=member("What the model thought, or an empty text if the signature holds it."),
    ),
    _block("redacted_thinking", data=member("Thinking that another server encrypted; not read.")),
    _block(
        "tool_use",
        id=member("Id of the call, which the block with its result repeats."),
        name=CALLED_NAME_SCHEMA,
        input=member("The arguments of the call.", {"type": "object"}),
    ),
)
_CHANGED = member("The tool that changes.", _block("tool_reference", name=_REFERENCE))
_MESSAGE = {
    "title": "AnthropicMessage",
    "anyOf": [
        _turn("user", *_READABLE, _TOOL_RESULT),
        _turn("assistant", *_FROM_ASSISTANT),
        _turn(
            "system",
            _TEXT_BLOCK,
            _block("tool_addition", tool=_CHANGED),
            _block("tool_removal", tool=_CHANGED),
        ),
    ],
}
_TOOL = {"title": "AnthropicTool"} | object_schema(
    ["name", "input_schema"],
    type=member(
        "Tools of Anthropic's servers have other types, and are left out.",
        {"anyOf": [{"const": "custom"}, {"type": "null"}]},
    ),
    name=TOOL_NAME_SCHEMA,
    description=TOOL_ABOUT_SCHEMA,
    input_schema=PARAMETERS_SCHEMA,
    strict=STRICT_SCHEMA,
    defer_loading=member(
        "Whether the tool is left out of the prompt until a message refers to it. Default: false.",
        {"type": ["boolean", "null"]},
    ),
)
_TOOL_CHOICE = object_schema(
    ["type"],
    type=member(
        "Whether the model decides, must call any tool, must call the named one, or calls none.",
        {"enum": ["auto", "any", "tool", "none"]},
    ),
    name=member("Name of the tool to call, with the type tool."),
    disable_parallel_tool_use=member(
        "Whether the answer may have at most one call. Default: false.", _FLAG
    ),
)
_THINKING = object_schema(
    ["type"],
    type=member(
        "Whether the model thinks before it answers.",
        {"enum": ["enabled", "disabled", "adaptive"]},
    ),
    budget_tokens=member("Most tokens of the thinking.", {"type": "integer", "minimum": 0}),
    display=member(
        "With omitted, thinking blocks have no text. Otherwise they have all of it.",
        {"enum": ["summarized", "omitted", "updates"]},
    ),
)

_SYSTEM = {"anyOf": _content(_TURN, _TEXT_BLOCK)["anyOf"]}

Message = Annotated[Any, Meta(extra_json_schema=_MESSAGE)]
System = Annotated[Any, Meta(extra_json_schema=_SYSTEM)]
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
