"""Builds the Response object.

It has all members of the official SDK's model; those without a value are null.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.api.openai.message import warning_of
from gateway.api.openai.response_builder import SERVICE_TIER
from gateway.api.responses.items import RESPONSE_PREFIX, Item
from gateway.api.responses.requests import ResponsesBody
from gateway.formats.events import OutputWarning
from gateway.generation.group import ChoiceGroup
from gateway.http.errors import fault_of
from protocol.errors import ServingError
from protocol.sampling import SamplingParams

Json = dict[str, Any]
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""HTTP status -> error code. Others are "server_error"; OpenAI defines only these codes."""


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The members of a response that do not change.

    fields  all of them except id and created_at
    """

    id: str
    fields: Json
    created_at: int = field(default_factory=lambda: int(time.time()))

    @property
    def number(self) -> str:
        """The part of the id that its items' ids contain."""
        return self.id.removeprefix(RESPONSE_PREFIX)

    def response(
        self,
        status: str,
        output: Sequence[Item] = (),
        *,
        usage: Json | None = None,
        error: Json | None = None,
        incomplete: str | None = None,
        warnings: Sequence[OutputWarning] = (),
        timings: Json | None = None,
    ) -> Json:
        """Return the response in its current state."""
        response = {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": incomplete} if incomplete else None,
            "output": list(output),
            "usage": usage,
            **self.fields,
        }
        if warnings:
            response["warnings"] = [warning_of(warning, None) for warning in warnings]
        return response | (timings or {})


def fields_of(
    body: ResponsesBody,
    params: SamplingParams,
    *,
    model: str,
    fingerprint: str,
    stores: bool,
    extensions: Mapping[str, Any],
) -> Json:
    """Return the request's fields as the response repeats them, with defaults filled in.

    params      the sampling parameters in effect
    stores      whether the response is stored
    extensions  our own members about the request
    """
    repeated = {name: getattr(body, name) for name in _REPEATED}
    sampled = {name: getattr(params, name) for name in _SAMPLED}
    return {
        "model": model,
        **repeated,
        **sampled,
        "background": bool(body.background),
        "store": stores,
        "tools": [_tool(tool) for tool in body.tools or ()],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "top_logprobs": body.top_logprobs or 0,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "text": {
            "format": (body.text and body.text.format) or {"type": "text"},
            "verbosity": "medium",
        },
        "truncation": body.truncation or "disabled",
        "metadata": body.metadata or {},
        "service_tier": SERVICE_TIER,
        "conversation": None,
        "prompt": None,
        "system_fingerprint": fingerprint,
        **extensions,
    }


_REPEATED = (
    *("instructions", "previous_response_id", "max_output_tokens", "max_tool_calls"),
    *("user", "safety_identifier", "prompt_cache_key"),
)
_SAMPLED = ("temperature", "top_p", "frequency_penalty", "presence_penalty")


def _tool(tool: Mapping[str, Any]) -> Json:
    """Return a tool with all members of a function tool."""
    rest = {"description": None, "parameters": None, "strict": False}
    return rest | {name: value for name, value in tool.items() if value is not None}


def usage_of(group: ChoiceGroup) -> Json:
    """Return the usage so far. `reasoning_tokens` is 0 if they cannot be counted."""
    prompt, generated = group.num_prompt_tokens, group.num_generated_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": group.num_cached_tokens,
            "cache_write_tokens": 0,  # cache writes are not charged
        },
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": group.num_reasoning_tokens or 0},
        "total_tokens": prompt + generated,
    }


def error_of(error: ServingError) -> Json:
    """Return the `error` of a failed response. The message of an internal error is an error id; the
    log has the details."""
    fault = fault_of(error)
    return {
        "code": _CODES.get(fault.status, "server_error"),
        "message": fault.message,
        "param": fault.param,
        "type": fault.code,
    }
