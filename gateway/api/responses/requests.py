"""What a client may ask of /v1/responses, field by field: types and bounds, none of the meaning.

A field that a chat has, too, means the same here and has the same type. Fields that are null are
fields that are absent. What this server cannot honour is here so that it can be refused by name
(`checks`); what is not here is accepted without effect and named in the answer.
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
    """include_obfuscation  accepted: no padding is sent either way"""

    include_obfuscation: bool | None = None


class ResponseReasoningOptions(msgspec.Struct, frozen=True):
    """effort   as a chat's `reasoning_effort`
    summary  accepted: reasoning is told as it is, so none is summed up
    """

    effort: Any = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseTextOptions(msgspec.Struct, frozen=True):
    """format     what the answer has to be: text, json_object, json_schema
    verbosity  accepted without effect
    """

    format: Object | None = None
    verbosity: str | None = None


class ResponsesBody(FormFields, frozen=True, kw_only=True):
    """POST /v1/responses.

    previous_response_id  go on behind that response: its input, its output, and all before it
    store                 keep the response, so that it can be asked for and gone on with
    background            answer at once; the response is made without its client
    truncation            "auto": the oldest items are left out where not all fit
    include               `message.output_text.logprobs`, `reasoning.encrypted_content`
    prompt_cache_key      accepted without effect: equal prompts are found without it
    service_tier          accepted without effect: there is one
    max_tool_calls        accepted: it is about tools that run in the server, and none do
    timings               also tell where the time went
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
    def tells_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def tells_encrypted(self) -> bool:
        return ENCRYPTED in (self.include or ())


LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
INCLUDES = (LOGPROBS, ENCRYPTED)

responses_decoder = msgspec.json.Decoder(ResponsesBody)
