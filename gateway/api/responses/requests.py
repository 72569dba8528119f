"""Request body of /v1/responses: field types and bounds.

- Fields that a chat request has too have the same type and meaning.
- A null field equals an absent field.
- Unsupported fields that would change the answer are declared, so that `check` can refuse them.
- Unknown fields have no effect. The response lists them in `ignored_params`, or the request is
  refused if it sets `strict_params`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from gateway.api.openai.item_schemas import (
    ARGUMENTS_SCHEMA,
    CALLED_NAME_SCHEMA,
    PARAMETERS_SCHEMA,
    STRICT_SCHEMA,
    TOOL_ABOUT_SCHEMA,
    TOOL_NAME_SCHEMA,
    JsonSchemaDict,
    content_schema,
    member,
    object_schema,
    part_schema,
)
from gateway.api.openai.requests import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CacheSalt,
    ChatBody,
    FormFields,
    Object,
    Priority,
    Stop,
    Timeout,
    unsupported,
)
from gateway.http.json_values import check_depth
from gateway.http.text_fields import Label, Name, PromptText, TemplateText
from protocol.engine.sampling import MaxTokens, NumLogprobs
from protocol.wire.errors import InvalidRequest

# ---- JSON Schemas of values that `items` and `translate` check, for the OpenAPI document
#
# Decoding does not use these schemas, because a decoder of unions could not name the exact path of
# an error.

_NULLABLE: JsonSchemaDict = {"type": ["string", "null"]}
_ID = member("Id of the item, as a response had it.", _NULLABLE)


def _item(kind: str, required: Sequence[str], **properties: JsonSchemaDict) -> JsonSchemaDict:
    return object_schema(["type", *required], type={"const": kind}, id=_ID, **properties)


_PART = part_schema("input_text", "output_text", "text")
_INPUT_ITEM = {
    "title": "InputItem",
    "anyOf": [
        object_schema(
            ["role", "content"],
            type={"const": "message"},
            role=member(
                "Who speaks. A developer message is a system message.",
                {"enum": ["user", "assistant", "system", "developer"]},
            ),
            content=content_schema("The text of the message, or a list of its parts.", _PART),
        ),
        _item(
            "function_call",
            ["call_id", "name", "arguments"],
            call_id=member("Id of the call, which the item with its result repeats."),
            name=CALLED_NAME_SCHEMA,
            arguments=ARGUMENTS_SCHEMA,
        ),
        _item(
            "function_call_output",
            ["call_id", "output"],
            call_id=member("Id of the call that this item answers."),
            output=content_schema("What the function returned: a text, or a list of parts.", _PART),
        ),
        _item(
            "reasoning",
            [],
            content=member(
                "What the model thought before it answered, as a list of parts.",
                {"type": ["array", "null"], "items": part_schema("reasoning_text")},
            ),
            encrypted_content=member(
                "The thinking in the form that the response had it.", _NULLABLE
            ),
        ),
        object_schema(
            ["type", "id"],
            type={"const": "item_reference"},
            id=member("Id of a stored item that stands here."),
        ),
    ],
}
_FUNCTION_TOOL = {"title": "FunctionTool"} | object_schema(
    ["type", "name"],
    type={"const": "function"},
    name=TOOL_NAME_SCHEMA,
    description=TOOL_ABOUT_SCHEMA | _NULLABLE,
    parameters=PARAMETERS_SCHEMA | {"type": ["object", "null"]},
    strict=STRICT_SCHEMA,
)

InputItem = Annotated[Any, Meta(extra_json_schema=_INPUT_ITEM)]
FunctionTool = Annotated[Any, Meta(extra_json_schema=_FUNCTION_TOOL)]


# ---- the body

MAX_ID_CHARS = 256
MAX_METADATA = 16

Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=MAX_METADATA),
]
Input = PromptText | Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)]


class ResponseStreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream.

    include_obfuscation  without effect: no padding is sent
    """

    include_obfuscation: bool | None = None


class ResponseReasoningOptions(msgspec.Struct, frozen=True):
    """Options of reasoning.

    effort            how much the model thinks before it answers, like `reasoning_effort` of a
                      chat. Example: "low"
    summary           any value but "none": the reasoning is returned as a summary, in full
    generate_summary  older name of `summary`
    """

    effort: Any = None
    summary: Label | None = None
    generate_summary: Label | None = None


class ResponseTextOptions(msgspec.Struct, frozen=True):
    """Options of the answer's text.

    format     the form of the answer: text, json_object or json_schema. Default: text.
               Example: {"type": "json_object"}
    verbosity  without effect
    """

    format: Object | None = None
    verbosity: Label | None = None


class ResponsesBody(FormFields, frozen=True, kw_only=True):
    """A text or items to answer, and how.

    input                 what the model answers: a text, or a list of items. Example: "Hello!"
    instructions          the system message; it does not apply to responses that continue this one
    previous_response_id  continue this response: prepend its input and output, and the items of all
                          responses that it continues
    store                 whether to store the response, so that it can be retrieved and continued.
                          Default: true, if the server stores responses
    background            whether to return at once, and to generate the response even if the client
                          disconnects. Default: false
    stream_options        options of a stream; only with `stream`
    tools                 the functions that the model may call
    reasoning             how much the model thinks, and whether the response has the reasoning.
                          Example: {"effort": "low"}
    text                  the form of the answer. Example: {"format": {"type": "json_object"}}
    truncation            "auto" drops the oldest items if the prompt is too long. Default: disabled
    include               optional members of the output: `message.output_text.logprobs`,
                          `reasoning.encrypted_content`
    top_logprobs          number of most likely tokens to report at each place. Default: none
    max_output_tokens     most tokens of the answer, its reasoning included. Default: until the
                          context is full
    metadata              pairs of texts that the response repeats. Example: {"topic": "tides"}
    user, safety_identifier   an identifier of the end user, which the response repeats
    prompt_cache_key      without effect: equal prompts share a cache without a key
    prompt_cache_retention, prompt_cache_options, service_tier   without effect
    max_tool_calls        without effect: the server runs no tools
    conversation          not supported; use `previous_response_id`
    context_management    not supported; use `truncation`
    moderation, prompt    not supported; refused if set
    messages              not supported; use `input`
    max_tokens, max_completion_tokens   not supported; use `max_output_tokens`
    n                     accepted only if it is 1
    response_format       not supported; use `text.format`
    """

    described_like: ClassVar = ChatBody

    input: Input
    model: Name | None = None
    instructions: PromptText | None = None
    previous_response_id: Id | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Label | Object | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    reasoning: ResponseReasoningOptions | None = None
    text: ResponseTextOptions | None = None
    include: Annotated[list[Label], Meta(max_length=16)] | None = None
    top_logprobs: NumLogprobs | None = None
    max_output_tokens: MaxTokens | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    prompt_cache_options: Object | None = None
    service_tier: Label | None = None
    stop: Stop | None = None
    strict_params: bool | None = None
    timings: bool | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    timeout_s: Timeout | None = None
    queue_timeout_s: Timeout | None = None
    documents: Annotated[list[Object], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template: TemplateText | None = None
    chat_template_kwargs: Object | None = None
    return_effective_kwargs: bool | None = None
    thinking: Any = None
    enable_thinking: Any = None
    thinking_token_budget: Any = None
    include_reasoning: bool | None = None
    conversation: Any = None
    context_management: Any = None
    moderation: Any = None
    prompt: Any = None
    messages: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    n: Any = None
    response_format: Any = None

    @property
    def summary(self) -> str | None:
        """The kind of summary of the reasoning that the request asks for; None: none."""
        wanted = self.reasoning and (self.reasoning.summary or self.reasoning.generate_summary)
        return None if wanted == "none" else wanted or None

    @property
    def includes_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def includes_encrypted(self) -> bool:
        return ENCRYPTED in (self.include or ())


LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
INCLUDES = (LOGPROBS, ENCRYPTED)
"""The supported values of `include`. Others name what only OpenAI's service can return."""


# ---- checks across fields

_NESTED = ("input", "tools", "tool_choice", "prompt_cache_options")
_REFUSED = {
    "conversation": "use previous_response_id to continue a conversation",
    "context_management": "use truncation 'auto' to drop the oldest items",
    "moderation": "",
    "prompt": "",
    "messages": "use input",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "response_format": "use text.format",
}
"""Unsupported field -> advice in the error."""


def check(body: ResponsesBody) -> None:
    """Raise InvalidRequest for an unsupported field, or for fields that exclude each other."""
    for field in _NESTED:
        check_depth(getattr(body, field), field)
    for field, instead in _REFUSED.items():
        if getattr(body, field) not in (None, False, [], {}):
            raise unsupported(field, instead)
    if body.n not in (None, 1):
        raise unsupported("n", "the only supported value is 1")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest.at("stream_options", "requires stream to be true")


def fields_without_effect(body: ResponsesBody, unknown: list[str]) -> list[str]:
    """Return the fields that are set but have no effect: the `unknown` fields, and fields that are
    accepted only because some clients always send them."""
    names = list(unknown)
    for place, name in enumerate(body.include or ()):
        if name not in INCLUDES:
            names.append(f"include[{place}]")
    if body.text is not None and body.text.verbosity is not None:
        names.append("text.verbosity")
    if body.prompt_cache_key is not None:
        names.append("prompt_cache_key")
    return names
