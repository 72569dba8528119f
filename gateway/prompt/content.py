"""Checks the messages of a request and turns them into turns of a conversation.

The input is decoded JSON in OpenAI's form. Each field is checked here, so that errors name the
field. The turns do not depend on the model's template; `fit` brings them into its form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.formats.events import INVALID_JSON
from gateway.formats.text_argument import ARGUMENT
from protocol.wire.errors import InvalidRequest
from protocol.wire.field_words import one_of

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that are text."""
REASONING_MEMBERS = ("reasoning", "reasoning_content", "thinking")
"""Members of a message that may hold its reasoning. The first one that is set counts."""
ROLE_OF_MEMBER: Mapping[str, str] = {
    **dict.fromkeys(("tool_calls", "function_call", *REASONING_MEMBERS), "assistant"),
    "tool_call_id": "tool",
}
"""Member of a message -> the only role whose messages can have it."""
PART_SEPARATOR = "\n"
"""Joins the text parts of a message for templates that accept only strings."""


@dataclass(slots=True)
class TurnCall:
    """A tool call in an assistant's turn."""

    name: str
    #: The arguments as an object. If the model wrote none, it has the one member INVALID_JSON.
    arguments: dict[str, Any]
    #: The arguments as the client sent them, if they were sent as text.
    text: str | None = None
    id: str | None = None
    #: Further members of the call and of its `function`, which some templates read.
    extra: dict[str, Any] = field(default_factory=dict)
    function_extra: dict[str, Any] = field(default_factory=dict)

    @property
    def is_invalid(self) -> bool:
        """Whether the model wrote a text that is not a JSON object."""
        return self.text is not None and self.arguments == {INVALID_JSON: self.text}


@dataclass(slots=True)
class ChatTurn:
    """A message of a conversation, checked."""

    #: One of ROLES without "function", which is replaced by "tool".
    role: str
    #: The texts of the content's parts. A content that is a string is one text.
    texts: list[str] = field(default_factory=list)
    #: The client sent a list of parts.
    has_parts: bool = False
    reasoning: str | None = None
    calls: list[TurnCall] = field(default_factory=list)
    #: The id of the call that a tool's turn answers.
    call_id: str | None = None
    #: Further members of the message, which some templates read.
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The content as one text."""
        return PART_SEPARATOR.join(self.texts)


def to_json(value: Any) -> str:
    """Return a decoded JSON value as JSON text, without blanks."""
    return msgspec.json.encode(value).decode()


def checked_turns(messages: Sequence[Any], param: str = "messages") -> list[ChatTurn]:
    """Return the turns of a conversation.

    param  path of the messages in the request

    Raises InvalidRequest if a message is invalid. The error names the field, such as
    `messages[2].role`.
    """
    if not messages:
        raise InvalidRequest.wrong(param, "a list of at least 1 message", messages)
    turns = [_turn(message, f"{param}[{i}]") for i, message in enumerate(messages)]
    _check_call_ids(turns, param)
    return turns


def _check_call_ids(turns: Sequence[ChatTurn], param: str) -> None:
    """Raise InvalidRequest if a `tool_call_id` is not the id of an earlier tool call.

    Ids are optional: a `tool_call_id` is not checked if no earlier tool call has an id.
    """
    call_ids: set[str] = set()
    for index, turn in enumerate(turns):
        call_ids |= {call.id for call in turn.calls if call.id}
        if turn.call_id is not None and call_ids and turn.call_id not in call_ids:
            at = f"{param}[{index}].tool_call_id"
            raise InvalidRequest.at(at, f"no earlier tool call has the id {turn.call_id!r}")


def _turn(message: Any, at: str) -> ChatTurn:
    """Return one message as a turn. `at` is the path of the message in the request."""
    if not isinstance(message, Mapping):
        raise InvalidRequest.wrong(at, "an object", message)
    extra = dict(message)
    role, content = _role(extra.pop("role", None), at), extra.pop("content", None)
    _check_members(extra, role, at)
    name = _optional_text(extra, "name", at)
    call_id = _optional_text(extra, "tool_call_id", at)
    if name is not None:
        extra["name"] = name
    calls, old_call = extra.pop("tool_calls", None), extra.pop("function_call", None)
    found: list[TurnCall] = []
    if calls is None and old_call is not None:  # OpenAI's deprecated form
        found = [_function(old_call, f"{at}.function_call")]
    elif calls is not None:
        found = _tool_calls(calls, f"{at}.tool_calls")
    return ChatTurn(
        role=role,
        texts=_texts(content, f"{at}.content"),
        has_parts=not isinstance(content, str | None),
        reasoning=_reasoning(extra, at),
        calls=found,
        call_id=call_id if role == "tool" else None,
        extra=extra,
    )


def _check_members(message: Mapping[str, Any], role: str, at: str) -> None:
    """Raise InvalidRequest if a message has a member that only messages of another role can have.
    Templates would omit it. Clients may send empty ones with every message."""
    for name, owner in ROLE_OF_MEMBER.items():
        if message.get(name) and role != owner:
            raise InvalidRequest.at(
                f"{at}.{name}",
                f"only a message of the role {owner!r} can have this field, not one of the role "
                f"{role!r}",
            )


def _role(role: Any, at: str) -> str:
    if role not in ROLES:
        raise InvalidRequest.wrong(f"{at}.role", one_of(ROLES), role)
    return "tool" if role == "function" else str(role)


def _optional_text(message: dict[str, Any], field: str, at: str) -> str | None:
    """Remove a member and return it. Raise InvalidRequest if it is neither a string nor null."""
    value = message.pop(field, None)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest.wrong(f"{at}.{field}", "a string or null", value)
    return value


def _reasoning(message: dict[str, Any], at: str) -> str | None:
    """Remove the members that may hold the message's reasoning. Return the reasoning."""
    values = [_optional_text(message, name, at) for name in REASONING_MEMBERS]
    return next((value for value in values if value), None)


def _texts(content: Any, at: str) -> list[str]:
    """Return the texts of a message's content."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        raise InvalidRequest.wrong(at, "a string or a list of parts", content)
    return [_part_text(part, f"{at}[{i}]") for i, part in enumerate(content)]


def _part_text(part: Any, at: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in TEXT_PARTS:
        words = f"{one_of(('text',))}, because this model reads text only"
        raise InvalidRequest.wrong(f"{at}.type", words, kind)
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest.wrong(f"{at}.text", "a string", text)
    return text


def _tool_calls(calls: Any, at: str) -> list[TurnCall]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidRequest.wrong(at, "a list", calls)
    return [_tool_call(call, f"{at}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, at: str) -> TurnCall:
    extra = dict(call) if isinstance(call, Mapping) else {}
    if extra.get("type") == "custom":
        found = _custom(extra.pop("custom", None), f"{at}.custom")
    else:
        found = _function(extra.pop("function", None), f"{at}.function")
    found.id = _optional_text(extra, "id", at)
    extra.pop("type", None)
    found.extra = extra
    return found


def _custom(custom: Any, at: str) -> TurnCall:
    """Return the call of a custom tool: for the model, a call of a function with one text."""
    if not isinstance(custom, Mapping):
        raise InvalidRequest.wrong(at, "an object", custom)
    name, text = custom.get("name"), custom.get("input")
    for member, value in (("name", name), ("input", text)):
        if not isinstance(value, str):
            raise InvalidRequest.wrong(f"{at}.{member}", "a string", value)
    arguments = {ARGUMENT: text}
    return TurnCall(str(name), arguments, to_json(arguments))


def _function(function: Any, at: str) -> TurnCall:
    if not isinstance(function, Mapping):
        raise InvalidRequest.wrong(at, "an object", function)
    extra = dict(function)
    name, arguments = extra.pop("name", None), extra.pop("arguments", None)
    if not isinstance(name, str):
        raise InvalidRequest.wrong(f"{at}.name", "a string", name)
    value = _arguments(arguments, f"{at}.arguments")
    text = arguments if isinstance(arguments, str) and arguments.strip() else None
    return TurnCall(name, value, text, function_extra=extra)


def _arguments(arguments: Any, at: str) -> dict[str, Any]:
    """Return the arguments of a tool call as an object.

    OpenAI's clients send JSON text. An object is accepted too. null, "" and other empty values mean
    that there are no arguments. A model may write a text that is not a JSON object, or its answer
    may be cut off in one. Clients send this text back as they received it, so it is accepted, as
    the only member of an object.
    """
    if isinstance(arguments, str) and arguments.strip():
        return _decoded(arguments, at)
    if not arguments and not isinstance(arguments, int | list):
        return {}
    if not isinstance(arguments, dict):
        raise InvalidRequest.wrong(at, "the JSON text of an object", arguments)
    return arguments


def _decoded(text: str, at: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except UnicodeEncodeError as error:  # half of a surrogate pair cannot be sent to the model
        raise InvalidRequest.at(at, f"not valid Unicode: {error}") from None
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: text}
