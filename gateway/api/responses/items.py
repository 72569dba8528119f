"""Checks input items and assigns item ids.

An item is a JSON object: a message, a call, a call's output, reasoning, or a reference to an item
of a stored response. A `PlacedItem` has the item's path in the request, for errors. An id that this
server assigns contains the id of the response, so a reference is resolved without an index:

    msg_RESPONSE_3   item 3 of the output      msg_RESPONSE_i3   item 3 of the input
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.api.responses.item_texts import NOTES, SERVICE_CALLS
from gateway.api.responses.tools import response_tools
from gateway.http.json_values import as_object
from protocol.wire.errors import InvalidRequest
from protocol.wire.field_words import one_of

Item = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")
SYSTEM_ROLES = ("system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
IMAGE_PART = "input_image"
OTHER_PARTS = ("input_image", "input_file", "input_audio", "encrypted_content")
"""Types of parts of a tool's output that the model cannot read."""
RESPONSE_PREFIX = "resp_"
PREVIOUS = "previous_response_id"
"""The request field with the id of the previous response. Errors about the items of a previous
response name this field."""
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "shell_call": "sh",
    "shell_call_output": "sho",
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
}
_OTHER_PREFIX = "item"
_OWN_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_(?:i?)\d+")
_SEALED = "tidegate1."
"""Prefix of the `encrypted_content` that `seal` makes."""


class PlacedItem(msgspec.Struct, frozen=True):
    """An item and its path in the request, such as `input[2]`."""

    item: Item
    at: str


def item_id(kind: str, response_id: str, place: int, *, in_input: bool = False) -> str:
    """Return the id of the item at index `place` of a response's output, or of its input.

    kind   the item's type, such as "message"
    """
    number = response_id.removeprefix(RESPONSE_PREFIX)
    prefix = _PREFIXES.get(kind, _OTHER_PREFIX)
    return f"{prefix}_{number}_{'i' if in_input else ''}{place}"


def response_of(item_id: str) -> str | None:
    """Return the id of the response that contains the item; None if this server did not assign the
    item's id."""
    found = _OWN_ID.fullmatch(item_id)
    return RESPONSE_PREFIX + found[1] if found else None


def input_items(value: str | Sequence[Any]) -> list[PlacedItem]:
    """Return the items of a request's `input`; a text is one user message. Raise InvalidRequest,
    naming the path, if the list is empty or an item is invalid."""
    if isinstance(value, str):
        part = {"type": "input_text", "text": value}
        return [PlacedItem({"type": "message", "role": "user", "content": [part]}, "input")]
    if not value:
        raise InvalidRequest.wrong("input", "a string, or a list of at least 1 item", value)
    places = [f"input[{place}]" for place in range(len(value))]
    return [PlacedItem(_checked(item, at), at) for item, at in zip(value, places, strict=True)]


def with_ids(items: Sequence[Item], response_id: str) -> list[Item]:
    """Return the items. Each item without an id gets one that contains the response's id."""
    return [
        item
        if item.get("id")
        else {**item, "id": item_id(item["type"], response_id, place, in_input=True)}
        for place, item in enumerate(items)
    ]


def seal(reasoning: str) -> str:
    """Return reasoning as `encrypted_content`, which is only encoded, not encrypted. A client that
    does not keep the text can send this value back instead."""
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


def reasoning_text(item: Mapping[str, Any], at: str) -> str:
    """Return the text of a reasoning item: its content, else its `encrypted_content`, else its
    summary. Raise InvalidRequest if this server did not write the `encrypted_content`."""
    if item.get("content"):
        return "".join(part["text"] for part in item["content"])
    sealed = item.get("encrypted_content")
    if sealed:
        return _unsealed(sealed, f"{at}.encrypted_content")
    return "\n\n".join(part["text"] for part in item.get("summary") or ())


def _unsealed(sealed: str, at: str) -> str:
    try:
        if not sealed.startswith(_SEALED):
            raise ValueError("wrong prefix")
        return base64.b64decode(sealed[len(_SEALED) :], validate=True).decode()
    except (ValueError, binascii.Error):
        raise InvalidRequest.at(at, "must be a value that this server wrote") from None


# ---- checks, by the item's type


def _checked(item: Any, at: str) -> Item:
    item = as_object(item, at)
    kind = item.get("type") or _kind_without_type(item)
    if not isinstance(kind, str) or kind not in _CHECKS:
        raise InvalidRequest.wrong(f"{at}.type", one_of(_CHECKS), kind)
    if item.get("id") is not None:
        _text(item, "id", at)
    required, check = _CHECKS[kind]
    for name in required:
        _text(item, name, at)
    if check is not None:
        check(item, at)
    return {**item, "type": kind}


def _kind_without_type(item: Mapping[str, Any]) -> str | None:
    """Return the inferred type of an item without `type`, or None. SDKs omit the type of messages
    and references."""
    if "role" in item:
        return "message"
    return "item_reference" if set(item) <= {"id", "type"} and "id" in item else None


def _message(item: Mapping[str, Any], at: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise InvalidRequest.wrong(f"{at}.role", one_of(ROLES), role)
    _content(item.get("content"), f"{at}.content", images=role == "user")


def _output(item: Mapping[str, Any], at: str) -> None:
    """Check the output of a call. Parts that are no text are allowed: the user cannot change what a
    tool returns, so the model reads a note in their place."""
    value, at = item.get("output"), f"{at}.output"
    if isinstance(value, str):
        return
    if not isinstance(value, list):
        raise InvalidRequest.wrong(at, "a string or a list of content parts", value)
    for place, part in enumerate(value):
        inner = f"{at}[{place}]"
        kind = as_object(part, inner).get("type")
        if kind in TEXT_PARTS:
            _text(part, "text", inner)
        elif kind not in OTHER_PARTS:
            known = (*TEXT_PARTS, *OTHER_PARTS)
            raise InvalidRequest.wrong(f"{inner}.type", one_of(known), kind)


def _shell_output(item: Mapping[str, Any], at: str) -> None:
    for place, chunk in enumerate(_list(item, "output", at)):
        inner = f"{at}.output[{place}]"
        as_object(chunk, inner)
        for name in ("stdout", "stderr"):
            if chunk.get(name) is not None:
                _text(chunk, name, inner)


def _patch_output(item: Mapping[str, Any], at: str) -> None:
    for name in ("status", "output"):
        if item.get(name) is not None:
            _text(item, name, at)


def _tools(item: Mapping[str, Any], at: str) -> None:
    response_tools((), [(_list(item, "tools", at), f"{at}.tools")])


def _namespace(item: Mapping[str, Any], at: str) -> None:
    if item.get("namespace") is not None:
        _text(item, "namespace", at)


def _search(item: Mapping[str, Any], at: str) -> None:
    if item.get("call_id") is not None:
        _text(item, "call_id", at)


def _action(item: Mapping[str, Any], at: str) -> None:
    member = "operation" if item["type"] == "apply_patch_call" else "action"
    as_object(item.get(member), f"{at}.{member}")


def _reasoning(item: Mapping[str, Any], at: str) -> None:
    for field, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        value = item.get(field)
        if value is not None:
            _parts(value, f"{at}.{field}", (kind,))
    if item.get("encrypted_content") is not None:
        _text(item, "encrypted_content", at)
    reasoning_text(item, at)


def _content(value: Any, at: str, *, images: bool) -> None:
    if not isinstance(value, str):
        _parts(value, at, TEXT_PARTS, images=images)


def _parts(value: Any, at: str, kinds: Sequence[str], *, images: bool = False) -> None:
    if not isinstance(value, list):
        raise InvalidRequest.wrong(at, "a list of content parts", value)
    for place, part in enumerate(value):
        inner = f"{at}[{place}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if images and kind == IMAGE_PART:
            continue
        if kind not in kinds:
            words = f"{one_of(kinds[:1])}, because this model reads text only"
            raise InvalidRequest.wrong(f"{inner}.type", words, kind)
        _text(part, "text", inner)


def _list(item: Mapping[str, Any], field: str, at: str) -> list[Any]:
    value = item.get(field)
    if not isinstance(value, list):
        raise InvalidRequest.wrong(f"{at}.{field}", "a list", value)
    return value


def _text(value: Mapping[str, Any], field: str, at: str) -> None:
    if not isinstance(value.get(field), str):
        raise InvalidRequest.wrong(f"{at}.{field}", "a string", value.get(field))


_CHECKS: Mapping[str, tuple[Sequence[str], Callable[[Mapping[str, Any], str], None] | None]] = {
    **dict.fromkeys((*SERVICE_CALLS, *NOTES), ((), None)),
    "message": ((), _message),
    "function_call": (("call_id", "name", "arguments"), _namespace),
    "function_call_output": (("call_id",), _output),
    "custom_tool_call": (("call_id", "name", "input"), _namespace),
    "custom_tool_call_output": (("call_id",), _output),
    "local_shell_call": (("call_id",), _action),
    "local_shell_call_output": (("output",), None),
    "shell_call": (("call_id",), _action),
    "shell_call_output": (("call_id",), _shell_output),
    "apply_patch_call": (("call_id",), _action),
    "apply_patch_call_output": (("call_id",), _patch_output),
    "tool_search_call": ((), _search),
    "tool_search_output": ((), _tools),
    "additional_tools": ((), _tools),
    "computer_call": (("call_id",), None),
    "computer_call_output": (("call_id",), None),
    "mcp_call": (("name", "arguments"), None),
    "reasoning": ((), _reasoning),
    "item_reference": (("id",), None),
}
"""Type of an item -> (the members that must be strings, the check of its other members)."""
