"""Response bodies of /v1/responses, for the OpenAPI document and for tests.

`response` and `events` encode the responses themselves.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.openai.responses import AnswerWarning, Effective
from gateway.observe.timings import Timings
from gateway.text.logprobs import ChatLogprob

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[ChatLogprob]


class ReasoningText(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"
):
    text: str


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """encrypted_content  the reasoning text in opaque form, if `include` requests it"""

    id: str
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: str | None


class FunctionCall(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"
):
    """status  "incomplete" if the call was cut off; `arguments` may then be invalid JSON"""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCall


class ResponseFault(msgspec.Struct, frozen=True, kw_only=True):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str
    param: str | None
    type: str | None


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class ResponseInputDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int


class ResponseOutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int


class ToldReasoning(msgspec.Struct, frozen=True, kw_only=True):
    effort: Any
    summary: None


class ToldText(msgspec.Struct, frozen=True, kw_only=True):
    format: dict[str, Any]
    verbosity: str


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True, rename={"object_": "object"}):
    """A response.

    store               whether the response is stored
    temperature, top_p  the values in effect
    """

    id: str
    object_: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    model: str
    instructions: str | None
    previous_response_id: str | None
    background: bool
    store: bool
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    max_tool_calls: int | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    frequency_penalty: float
    presence_penalty: float
    reasoning: ToldReasoning
    text: ToldText
    truncation: Literal["auto", "disabled"]
    metadata: dict[str, str]
    service_tier: str
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    conversation: None
    prompt: None
    system_fingerprint: str
    warnings: list[AnswerWarning] | UnsetType = UNSET
    ignored_params: list[str] | UnsetType = UNSET
    effective: Effective | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A typed stream event. Its members depend on its type."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class ResponseInputTokens(msgspec.Struct, frozen=True, kw_only=True, rename={"object_": "object"}):
    """input_tokens  number of prompt tokens"""

    object_: Literal["response.input_tokens"]
    input_tokens: int


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True, rename={"object_": "object"}):
    id: str
    object_: Literal["response"]
    deleted: Literal[True]


class ItemList(msgspec.Struct, frozen=True, kw_only=True, rename={"object_": "object"}):
    """first_id, last_id  ids in `data`; null if it is empty"""

    object_: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
