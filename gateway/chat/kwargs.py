"""The effective chat-template kwargs: one pure function, asked by everyone who needs to know.

Rendering, both parsers, the grammar gate and every API use its one result, so they cannot disagree
about whether the model thinks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protocol.errors import InvalidRequest

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""What a request says elsewhere, or what would change the rendering and not the prompt."""


def effective_kwargs(
    request_kwargs: Mapping[str, Any] | None = None,
    server_defaults: Mapping[str, Any] | None = None,
    *,
    reasoning_effort: str | None = None,
) -> dict[str, Any]:
    """What the template sees besides messages, tools and documents. From weak to strong:

    1. the server's defaults;
    2. `enable_thinking`, derived from the request's reasoning effort, if it has one;
    3. the request's `chat_template_kwargs`;
    4. `reasoning_effort` as the request's own field, over the same name in its kwargs.

    The values are shared with the arguments and must not be changed. Raises InvalidRequest naming
    the field: a reserved name, or an effort that is none.
    """
    asked = dict(request_kwargs or {})
    for name in asked:
        if name in RESERVED:
            raise InvalidRequest(
                f"{name} cannot be set in chat_template_kwargs",
                param=f"chat_template_kwargs.{name}",
            )
    effort = _effort(asked, reasoning_effort)
    derived: dict[str, Any] = {} if effort is None else {"enable_thinking": effort != "none"}
    own: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    return {**(server_defaults or {}), **derived, **asked, **own}


def _effort(asked: Mapping[str, Any], reasoning_effort: str | None) -> str | None:
    effort, param = reasoning_effort, "reasoning_effort"
    if effort is None:
        effort, param = asked.get("reasoning_effort"), "chat_template_kwargs.reasoning_effort"
    if effort is not None and effort not in REASONING_EFFORTS:
        raise InvalidRequest(
            f"{param} must be one of {', '.join(REASONING_EFFORTS)}; it is {effort!r}", param=param
        )
    return effort
