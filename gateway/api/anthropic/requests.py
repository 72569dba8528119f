"""Request bodies of /v1/messages: field types and bounds.

Our own fields have the names and bounds of `openai.requests`; fields that both structs have are
copied. `messages`, `system`, `tools` and other values with alternatives are checked step by step,
so that an error can name the exact path. Unknown fields have no effect; the response lists them.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.api.anthropic.documented import Message, System, Thinking, Tool, ToolChoice
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
from protocol.sampling import (
    MaxTokens,
)


class CountBody(FormFields, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens. Fields that concern only the answer have no effect.

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
    """POST /v1/messages."""

    max_tokens: MaxTokens


count_decoder = msgspec.json.Decoder(CountBody)
messages_decoder = msgspec.json.Decoder(MessagesBody)
