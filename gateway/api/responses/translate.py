"""Translates a Responses request into a chat request, and the chat's field names back.

Errors about the chat name the fields of the client's request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from gateway.api.openai.checks import check_chat
from gateway.api.openai.naming import rename_error, renaming
from gateway.api.openai.requests import ChatBody
from gateway.api.openai.tools import CHOICE_TYPES
from gateway.api.responses.items import PREVIOUS, PlacedItem
from gateway.api.responses.messages import ItemConversation
from gateway.api.responses.requests import ResponsesBody
from protocol.errors import InvalidRequest, RequestError

_TRANSLATED = frozenset(
    {
        *("messages", "n", "max_tokens", "max_completion_tokens", "response_format"),
        *("stream", "stream_options", "tools", "tool_choice", "reasoning", "top_logprobs"),
    }
)
_COMMON = frozenset(ResponsesBody.__struct_fields__) & frozenset(ChatBody.__struct_fields__)
SAME = _COMMON - _TRANSLATED
"""Fields with the same meaning in both; they are copied."""
_REQUEST_PATHS = (
    (re.compile(r"^(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"^tool_choice\.function\.name\b"), "tool_choice.name"),
    (
        re.compile(r"^tool_choice\.allowed_tools\.tools(\[\d+\])\.function\b"),
        r"tool_choice.tools\1",
    ),
    (re.compile(r"^tool_choice\.allowed_tools\b(?:\.)?"), "tool_choice."),
    (re.compile(r"^response_format\.json_schema\b"), "text.format"),
    (re.compile(r"^response_format\b"), "text.format"),
    (re.compile(r"^reasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"^max_(?:completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"^messages\b"), "input"),
)
_FORMATS = ("text", "json_object", "json_schema")


class ResponsesTranslation(msgspec.Struct, frozen=True):
    """A Responses request as a chat.

    chat   the chat request
    names  path prefix in the chat -> path prefix in the request
    """

    chat: ChatBody
    names: Mapping[str, str]

    def renaming(self) -> AbstractContextManager[None]:
        """Rename the fields of errors raised inside the block to those of the request."""
        return renaming(self.request_path)

    def rename_error(self, error: RequestError) -> RequestError:
        return rename_error(error, self.request_path)

    def request_path(self, name: str) -> str:
        """Return the path in the request of a chat field: replace its longest known prefix."""
        for end in sorted({len(name), *(m.start() for m in re.finditer(r"[.\[]", name))})[::-1]:
            if (own := self.names.get(name[:end])) is not None:
                return PREVIOUS if own.startswith(PREVIOUS) else own + name[end:]
        for pattern, own in _REQUEST_PATHS:
            if pattern.match(name):
                return pattern.sub(own, name)
        return name


def chat_body(body: ResponsesBody, items: Sequence[PlacedItem]) -> ResponsesTranslation:
    """Translate a checked body and check the resulting chat. `items` include those of previous
    responses. Raise InvalidRequest naming the request's field."""
    conversation = ItemConversation(body.instructions, items)
    if not conversation.messages:
        raise InvalidRequest("input: must have at least one message", param="input")
    chat = ChatBody(
        messages=conversation.messages,
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=_tool_choice(body.tool_choice),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        response_format=_response_format(body.text.format if body.text else None),
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.includes_logprobs,
        top_logprobs=body.top_logprobs if body.includes_logprobs else None,
        **{name: getattr(body, name) for name in SAME},
    )
    translation = ResponsesTranslation(chat, conversation.names)
    with translation.renaming():
        check_chat(chat)
    return translation


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat's form of a tool, with a nested `function`."""
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        tools = choice.get("tools")
        if isinstance(tools, list):
            tools = [_chosen(tool) for tool in tools]
        return {"type": kind, kind: {"mode": choice.get("mode"), "tools": tools}}
    if kind != "function":
        raise InvalidRequest(
            f"tool_choice.type: must be one of {', '.join(CHOICE_TYPES)}; got {kind!r}",
            param="tool_choice.type",
        )
    return _chosen(choice)


def _chosen(tool: Any) -> Any:
    """Return a tool choice with its name in a nested `function`."""
    if not isinstance(tool, Mapping):
        return tool
    return {"type": tool.get("type"), "function": {"name": tool.get("name")}}


def _response_format(format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the chat's form of `text.format`, with a nested `json_schema`."""
    if format is None:
        return None
    kind = format.get("type")
    if kind not in _FORMATS:
        raise InvalidRequest(
            f"text.format.type: must be one of {', '.join(_FORMATS)}; got {kind!r}",
            param="text.format.type",
        )
    if kind != "json_schema":
        return dict(format)
    return {"type": kind, "json_schema": {k: v for k, v in format.items() if k != "type"}}
