"""Adjusts requests whose clients assume limits of Anthropic's own models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.api.openai.requests import ChatBody
from gateway.formats.events import OutputWarning
from gateway.formats.model_format import ModelOutputFormat
from gateway.prompt.kwargs import thinking_budget

NO_BUDGET = "thinking_budget_not_kept"


def clamp_to_model(
    chat: ChatBody, max_len: int, output_format: ModelOutputFormat
) -> tuple[ChatBody, list[OutputWarning]]:
    """Return the request within the model's limits, and warnings about changes.

    These clients send the same `max_tokens` to every model, so a larger value is cut to `max_len`;
    an answer that fills the context then has the stop reason `model_context_window_exceeded`. They
    also send a thinking budget to models without a reasoning format, where it is dropped.
    """
    warnings = []
    changes: dict[str, Any] = {}
    if chat.max_tokens is not None and chat.max_tokens > max_len:
        changes["max_tokens"] = max_len
    budget = thinking_budget(chat.thinking_fields)
    if output_format.reasoning is None and budget:
        changes |= {"thinking": _without_budget(chat.thinking), "thinking_token_budget": None}
        message = (
            f"{budget[0]}: ignored, because this model's reasoning format is unknown; leave the "
            "field out, or restart the server with --reasoning-format"
        )
        warnings.append(OutputWarning(NO_BUDGET, message))
    return msgspec.structs.replace(chat, **changes), warnings


def _without_budget(thinking: object) -> object:
    if not isinstance(thinking, Mapping):
        return thinking
    return {name: value for name, value in thinking.items() if name != "budget_tokens"}
