"""Request body of /v1/responses: field types and bounds.

Fields that a chat has too have the same type and meaning. A null field equals an absent field.
Unsupported fields are declared so that `checks` can refuse them. Unknown fields have no effect; the
response lists them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.api.openai.requests import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CacheSalt,
    FormFields,
    Object,
    Priority,
    Stop,
    Timeout,
)
from gateway.api.responses.documented import Item, Tool
from protocol.sampling import (
    MaxTokens,
    NumLogprobs,
)

MAX_ID_CHARS = 256
MAX_METADATA = 16

Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=MAX_METADATA),
]
Input = str | Annotated[list[Item], Meta(max_length=MAX_MESSAGES)]


class ResponseStreamOptions(msgspec.Struct, frozen=True):
    """include_obfuscation  accepted without effect: no padding is sent"""

    include_obfuscation: bool | None = None


class ResponseReasoningOptions(msgspec.Struct, frozen=True):
    """effort   like `reasoning_effort` in a chat
    summary  accepted without effect: reasoning is returned in full
    """

    effort: Any = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseTextOptions(msgspec.Struct, frozen=True):
    """format     the answer's format: text, json_object or json_schema
    verbosity  accepted without effect
    """

    format: Object | None = None
    verbosity: str | None = None


class ResponsesBody(FormFields, frozen=True, kw_only=True):
    """POST /v1/responses.

    previous_response_id  continue this response: prepend its input and output, and all items
                          before them
    store                 store the response, so that it can be retrieved and continued
    background            return at once; the response is generated without its client
    truncation            "auto" drops the oldest items if the prompt is too long
    include               `message.output_text.logprobs`, `reasoning.encrypted_content`
    prompt_cache_key      accepted without effect: equal prompts share a cache without it
    service_tier          accepted without effect
    max_tool_calls        accepted without effect: the server runs no tools
    timings               include how long each stage took
    """

    input: Input
    model: str | None = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    reasoning: ResponseReasoningOptions | None = None
    text: ResponseTextOptions | None = None
    include: Annotated[list[str], Meta(max_length=16)] | None = None
    top_logprobs: NumLogprobs | None = None
    max_output_tokens: MaxTokens | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Object | None = None
    service_tier: str | None = None
    stop: Stop | None = None
    strict_params: bool | None = None
    timings: bool | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    timeout_s: Timeout | None = None
    queue_timeout_s: Timeout | None = None
    documents: Annotated[list[Object], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template: str | None = None
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
    def includes_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def includes_encrypted(self) -> bool:
        return ENCRYPTED in (self.include or ())


LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
INCLUDES = (LOGPROBS, ENCRYPTED)

responses_decoder = msgspec.json.Decoder(ResponsesBody)
