"""Response bodies of /v1/responses and their construction.

A response has all members of the official SDK's model. A member without a value is null.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.openai.responses import SERVICE_TIER, AnswerWarning, Effective
from gateway.api.responses.items import RESPONSE_PREFIX
from gateway.api.responses.requests import ResponsesBody
from gateway.formats.events import OutputWarning
from gateway.generation.group import ChoiceGroup
from gateway.http.errors import fault_of
from gateway.observe.timings import Timings
from gateway.text.logprobs import ChatLogprob
from protocol.engine.sampling import SamplingParams
from protocol.wire.errors import ServingError

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
FaultCode = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
"""The error codes that OpenAI defines."""
_FAULT_CODES: Mapping[int, FaultCode] = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""HTTP status -> error code. Other statuses are "server_error"."""


# ---- output items


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[ChatLogprob]


class ReasoningText(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"
):
    text: str


class SummaryText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    text: str


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """An output item with the model's reasoning.

    summary            the reasoning text, if the request asked for a summary; `content` is then
                       empty, because some clients show both
    encrypted_content  the reasoning text in opaque form, if `include` requests it
    """

    id: str
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: str | None


class FunctionCall(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"
):
    """An output item with a function call.

    namespace  the namespace of the function in the request's tools
    status     "incomplete" if the call was cut off; `arguments` may then be invalid JSON
    """

    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str
    status: ItemStatus


class CustomToolCall(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"
):
    """An output item with the call of a custom tool, which takes one text.

    status  "incomplete" if the call was cut off; `input` then need not match the tool's grammar
    """

    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str
    status: ItemStatus


class LocalShellCall(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="local_shell_call"
):
    """An output item with a program to run. `action` is of the type "exec"."""

    id: str
    call_id: str
    action: dict[str, Any]
    status: ItemStatus


class ShellCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="shell_call"):
    """An output item with shell commands to run."""

    id: str
    call_id: str
    action: dict[str, Any]
    environment: dict[str, Any]
    status: ItemStatus


class ApplyPatchCall(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="apply_patch_call"
):
    """An output item with a file to create, to change or to delete."""

    id: str
    call_id: str
    operation: dict[str, Any]
    status: ItemStatus


class ToolSearchCall(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_search_call"
):
    """An output item with a search for tools, which the client makes."""

    id: str
    call_id: str
    execution: Literal["client"]
    arguments: Any
    status: ItemStatus


ToolCallItem = (
    FunctionCall | CustomToolCall | LocalShellCall | ShellCall | ApplyPatchCall | ToolSearchCall
)
OutputItem = OutputMessage | ReasoningItem | ToolCallItem


# ---- the response


class ResponseFault(msgspec.Struct, frozen=True, kw_only=True):
    """The `error` member of a failed response.

    type  this server's own error code, which is more precise than `code`
    """

    code: FaultCode
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


class ResponseReasoning(msgspec.Struct, frozen=True, kw_only=True):
    effort: Any
    summary: str | None


class ResponseText(msgspec.Struct, frozen=True, kw_only=True):
    format: dict[str, Any]
    verbosity: str


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True, rename={"object_": "object"}):
    """A response of /v1/responses.

    store               whether the response is stored
    temperature, top_p  the values in effect
    """

    id: str
    object_: Literal["response"]
    created_at: int
    status: ResponseStatus
    completed_at: int | None
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    model: str
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    temperature: float
    top_p: float
    frequency_penalty: float
    presence_penalty: float
    background: bool
    store: bool
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    top_logprobs: int
    reasoning: ResponseReasoning
    text: ResponseText
    truncation: Literal["auto", "disabled"]
    metadata: dict[str, str]
    service_tier: str
    conversation: None
    prompt: None
    system_fingerprint: str
    ignored_params: list[str] | UnsetType = UNSET
    effective: Effective | UnsetType = UNSET
    warnings: list[AnswerWarning] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET

    def in_status(self, status: ResponseStatus) -> ResponseObject:
        return msgspec.structs.replace(self, status=status)


def new_response(
    body: ResponsesBody,
    params: SamplingParams,
    *,
    model: str,
    fingerprint: str,
    stores: bool,
    extensions: Mapping[str, Any],
) -> ResponseObject:
    """Return a queued response. It has the fields of the request, with defaults filled in.

    params      the sampling parameters in effect
    stores      whether the response is stored
    extensions  members about the request that OpenAI does not define
    """
    copied = {name: getattr(body, name) for name in _COPIED}
    sampled = {name: getattr(params, name) for name in _SAMPLED}
    return ResponseObject(
        id=RESPONSE_PREFIX + uuid.uuid4().hex,
        object_="response",
        created_at=int(time.time()),
        status="queued",
        completed_at=None,
        error=None,
        incomplete_details=None,
        output=[],
        usage=None,
        model=model,
        **copied,
        **sampled,
        background=bool(body.background),
        store=stores,
        tools=[_tool(tool) for tool in body.tools or ()],
        tool_choice=body.tool_choice or "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        top_logprobs=body.top_logprobs or 0,
        reasoning=ResponseReasoning(
            effort=body.reasoning and body.reasoning.effort, summary=body.summary
        ),
        text=ResponseText(
            format=(body.text and body.text.format) or {"type": "text"}, verbosity="medium"
        ),
        truncation=body.truncation or "disabled",
        metadata=body.metadata or {},
        service_tier=SERVICE_TIER,
        conversation=None,
        prompt=None,
        system_fingerprint=fingerprint,
        **extensions,
    )


_COPIED = (
    *("instructions", "previous_response_id", "max_output_tokens", "max_tool_calls"),
    *("user", "safety_identifier", "prompt_cache_key"),
)
"""Members of a response that are copied from the request."""
_SAMPLED = ("temperature", "top_p", "frequency_penalty", "presence_penalty")
"""Members of a response that are copied from the sampling parameters."""


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool of the request, with defaults for the members that a function omits."""
    rest: dict[str, Any] = {}
    if tool.get("type") == "function":
        rest = {"description": None, "parameters": None, "strict": False}
    return rest | {name: value for name, value in tool.items() if value is not None}


def usage_of(group: ChoiceGroup) -> ResponseUsage:
    """Return the usage so far. `reasoning_tokens` is 0 if reasoning tokens cannot be counted."""
    prompt, generated = group.num_prompt_tokens, group.num_generated_tokens
    return ResponseUsage(
        input_tokens=prompt,
        input_tokens_details=ResponseInputDetails(
            cached_tokens=group.num_cached_tokens,
            cache_write_tokens=0,  # cache writes are not charged
        ),
        output_tokens=generated,
        output_tokens_details=ResponseOutputDetails(group.num_reasoning_tokens or 0),
        total_tokens=prompt + generated,
    )


def response_fault(error: ServingError) -> ResponseFault:
    """Return the `error` of a failed response. For an internal error it contains only an error id.
    The log has the details under that id."""
    fault = fault_of(error)
    return ResponseFault(
        code=_FAULT_CODES.get(fault.status, "server_error"),
        message=fault.message,
        param=fault.param,
        type=fault.code,
    )


def warnings_of(warnings: Sequence[OutputWarning]) -> list[AnswerWarning] | UnsetType:
    return [AnswerWarning.from_event(warning, None) for warning in warnings] or UNSET


# ---- other bodies


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A typed stream event. Its members depend on its type."""

    type: str
    response: ResponseObject | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | SummaryText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    sequence_number: int


class ResponseInputTokens(msgspec.Struct, frozen=True, kw_only=True, rename={"object_": "object"}):
    """The number of prompt tokens of a request."""

    object_: Literal["response.input_tokens"]
    input_tokens: int


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True, rename={"object_": "object"}):
    id: str
    object_: Literal["response"]
    deleted: Literal[True]


class ItemList(msgspec.Struct, frozen=True, kw_only=True, rename={"object_": "object"}):
    """A page of input items.

    first_id, last_id  the first and the last id in `data`; null if `data` is empty
    """

    object_: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
