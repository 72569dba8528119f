"""Checks across the fields of a request, and refusals of unsupported fields.

An unsupported field that would change the answer is never ignored silently: `check` raises
InvalidRequest.
"""

from __future__ import annotations

from gateway.api.openai.checks import unsupported
from gateway.api.openai.tools import instead_of
from gateway.api.responses.requests import INCLUDES, ResponsesBody
from gateway.http.body import check_depth
from protocol.errors import InvalidRequest

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
"""Unsupported field -> advice."""
_ABOUT_FUNCTIONS = ("type", "name", "description", "parameters", "strict")


def check(body: ResponsesBody) -> None:
    for field in _NESTED:
        check_depth(getattr(body, field), field)
    for field, instead in _REFUSED.items():
        if getattr(body, field) not in (None, False, [], {}):
            raise unsupported(field, instead)
    if body.n not in (None, 1):
        raise unsupported("n", "the only supported value is 1")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: requires stream to be true", param="stream_options")
    for place, name in enumerate(body.include or ()):
        if name not in INCLUDES:
            raise unsupported(
                f"include[{place}]", f"must be one of {', '.join(INCLUDES)}; got {name!r}"
            )
    _check_tools(body)


def _check_tools(body: ResponsesBody) -> None:
    for place, tool in enumerate(body.tools or ()):
        at = f"tools[{place}]"
        if not isinstance(tool, dict):
            raise InvalidRequest(f"{at}: must be an object", param=at)
        if tool.get("type") != "function":
            kind = tool.get("type")
            raise InvalidRequest(
                f"{at}.type: must be 'function', because this server runs no tools of its own; got "
                f"{kind!r}{instead_of(kind)}",
                param=f"{at}.type",
            )
        for name, value in tool.items():
            if name not in _ABOUT_FUNCTIONS and value is not None:
                raise unsupported(f"{at}.{name}")


def fields_without_effect(body: ResponsesBody, unknown: list[str]) -> list[str]:
    """Return the fields without effect: unknown fields, and fields that are accepted because some
    clients always send them."""
    names = list(unknown)
    if body.text is not None and body.text.verbosity is not None:
        names.append("text.verbosity")
    if body.prompt_cache_key is not None:
        names.append("prompt_cache_key")
    return names
