"""Converts OpenAI's messages to the form that a chat template needs.

The input is decoded JSON. Each field is checked here, so that errors name the field. The output
consists of new dicts in the form that the template's `TemplateTraits` describe. Unknown fields are
kept, because some templates read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.prompt.template import TemplateTraits
from protocol.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that are text."""
PART_SEPARATOR = "\n"
"""Joins the text parts of a message for templates that accept only strings."""


def template_messages(
    messages: Sequence[Any], traits: TemplateTraits, param: str = "messages"
) -> list[dict[str, Any]]:
    """Return `messages` in the form that a template with these traits needs, after checking them.

    param  path of the messages in the request

    Raises InvalidRequest if a message is invalid. The error names the field, such as
    `messages[2].role`.
    """
    if not messages:
        raise InvalidRequest(f"{param} must contain at least one message", param=param)
    converted = [_message(m, traits, f"{param}[{i}]") for i, m in enumerate(messages)]
    _check_call_ids(converted, param)
    return converted


def _check_call_ids(messages: Sequence[Mapping[str, Any]], param: str) -> None:
    """Raise InvalidRequest if a `tool_call_id` is not the id of an earlier tool call.

    Ids are optional: a `tool_call_id` is not checked if no earlier tool call has an id.
    """
    call_ids: set[str] = set()
    for index, message in enumerate(messages):
        call_ids |= {call["id"] for call in message.get("tool_calls", ()) if call.get("id")}
        answered = message.get("tool_call_id") if message["role"] == "tool" else None
        if answered is not None and call_ids and answered not in call_ids:
            at = f"{param}[{index}].tool_call_id"
            raise InvalidRequest(f"{at}: no earlier tool call has the id {answered!r}", param=at)


def _message(message: Any, traits: TemplateTraits, at: str) -> dict[str, Any]:
    """Return one message in the template's form. `at` is the path of the message in the request."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{at} must be an object", param=at)
    role = _role(message, traits, at)
    result = {**message, "role": role}
    _optional_text(result, "name", at)
    _optional_text(result, "tool_call_id", at)
    calls, old_call = message.get("tool_calls"), result.pop("function_call", None)
    if calls is None and old_call is not None:  # OpenAI's deprecated form
        calls = result["tool_calls"] = [
            {"type": "function", "function": _function(old_call, traits, f"{at}.function_call")}
        ]
    elif calls is None:
        result.pop("tool_calls", None)
    else:
        result["tool_calls"] = _tool_calls(calls, traits, f"{at}.tool_calls")
    result["content"] = _content(message.get("content"), traits, f"{at}.content")
    if not result["content"] and calls and traits.null_content:
        result["content"] = None
    return result | _reasoning(result, at)


def _role(message: Mapping[str, Any], traits: TemplateTraits, at: str) -> str:
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"{at}.role must be one of {', '.join(ROLES)}, not {role!r}", param=f"{at}.role"
        )
    if role == "developer" and not traits.developer:
        return "system"
    return "tool" if role == "function" else str(role)


def _optional_text(message: dict[str, Any], field: str, at: str) -> None:
    """Check that a field is a string. Remove a field that is null, because templates only check
    whether the field exists."""
    value = message.get(field)
    if value is None:
        message.pop(field, None)
    elif not isinstance(value, str):
        raise InvalidRequest(f"{at}.{field} must be a string", param=f"{at}.{field}")


def _reasoning(message: dict[str, Any], at: str) -> dict[str, str]:
    """Return the message's reasoning under both of its common names, or {} if it has none."""
    for field in ("reasoning_content", "reasoning"):
        _optional_text(message, field, at)
    value = message.get("reasoning", message.get("reasoning_content"))
    return {} if value is None else {"reasoning": value, "reasoning_content": value}


def _content(content: Any, traits: TemplateTraits, at: str) -> Any:
    """Return a message's content as a string or a list of parts, as the template needs it."""
    if content is None:
        content = ""
    if isinstance(content, str):
        return content if traits.strings else [{"type": "text", "text": content}]
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{at} must be a string or a list of parts", param=at)
    texts = [_part_text(part, f"{at}[{i}]") for i, part in enumerate(content)]
    if traits.parts:
        return [{"type": "text", "text": text} for text in texts]
    return PART_SEPARATOR.join(texts)


def _part_text(part: Any, at: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in TEXT_PARTS:
        raise InvalidRequest(
            f"{at}.type must be 'text', not {kind!r}: this model accepts only text",
            param=f"{at}.type",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{at}.text must be a string", param=f"{at}.text")
    return text


def _tool_calls(calls: Any, traits: TemplateTraits, at: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidRequest(f"{at} must be a list", param=at)
    return [_tool_call(call, traits, f"{at}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, traits: TemplateTraits, at: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    written = _function(function, traits, f"{at}.function")
    call = {**call}
    _optional_text(call, "id", at)
    return {"type": "function", **call, "function": written}


def _function(function: Any, traits: TemplateTraits, at: str) -> dict[str, Any]:
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{at} must be an object", param=at)
    if not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{at}.name must be a string", param=f"{at}.name")
    arguments = _arguments(function.get("arguments"), f"{at}.arguments")
    if traits.string_arguments:
        given = function.get("arguments")
        text = given if isinstance(given, str) and given.strip() else _json(arguments)
        return {**function, "arguments": text}
    return {**function, "arguments": arguments}


def _arguments(arguments: Any, at: str) -> dict[str, Any]:
    """Return the arguments of a tool call as an object.

    OpenAI's clients send JSON text. An object is accepted too. null, "" and other empty values mean
    that there are no arguments.
    """
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise InvalidRequest(f"{at} is not JSON: {error}", param=at) from None
    if not arguments and not isinstance(arguments, int | list):
        return {}
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{at} must be the JSON text of an object", param=at)
    return arguments


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
