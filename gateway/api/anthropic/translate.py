"""Translates a Messages request into a chat request, and the chat's field names back.

Fields that both have are copied. Errors about the chat name the fields of the client's request.
Raises InvalidRequest naming the field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import msgspec

from gateway.api.anthropic.conversation import translate_conversation
from gateway.api.anthropic.pieces import members_of
from gateway.api.anthropic.requests import CountBody
from gateway.api.anthropic.tools import chat_tool_choice, chat_tools
from gateway.api.openai.checks import check_chat, unsupported
from gateway.api.openai.naming import renaming
from gateway.api.openai.requests import ChatBody
from gateway.formats.events import OutputWarning
from gateway.http.body import check_depth
from protocol.errors import InvalidRequest

Display = Literal["summarized", "omitted"]
_TRANSLATED = frozenset({"messages", "tools", "tool_choice", "thinking"})
SHARED = frozenset(CountBody.__struct_fields__) & frozenset(ChatBody.__struct_fields__)
SAME = SHARED - _TRANSLATED
"""Fields with the same meaning in both; they are copied."""
_OF_TOOLS = {
    r"^(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"^(tools\[\d+\])\.function\b": r"\1",
    r"^tool_choice\.function\.name$": "tool_choice.name",
}
_PLACE = re.compile(r"^messages\[(\d+)\]")


class MessagesTranslation(msgspec.Struct, frozen=True):
    """A Messages request as a chat.

    chat            the chat request
    places          the path in the request of each chat message
    format_field    the path of the field that sets the answer's format
    shows_thinking  include the text of thinking blocks in the response
    warnings        warnings about the request
    """

    chat: ChatBody
    places: list[str]
    format_field: str
    shows_thinking: bool
    warnings: list[OutputWarning]

    def renaming(self) -> AbstractContextManager[None]:
        """Rename the fields of errors raised inside the block to those of the request."""
        return renaming(self.request_path)

    def request_path(self, name: str) -> str:
        """Return the path in the request of a chat field."""
        if (found := _PLACE.match(name)) and int(found[1]) < len(self.places):
            return self.places[int(found[1])]
        for pattern, own in {**_OF_TOOLS, **self._of_formats()}.items():
            name = re.sub(pattern, own, name)
        return name

    def _of_formats(self) -> Mapping[str, str]:
        return {
            r"^response_format\.json_schema\b": self.format_field,
            r"^response_format\b": self.format_field,
            r"^reasoning_effort$": "output_config.effort",
            r"^stop\b": "stop_sequences",
            r"^continue_final_message$": "messages",
        }


def chat_body(body: CountBody) -> ChatBody:
    return translate(body).chat


def translate(body: CountBody) -> MessagesTranslation:
    """Translate a body and check the resulting chat."""
    for field in ("messages", "system", "tools", "output_config", "output_format", "thinking"):
        check_depth(getattr(body, field), field)
    for field in ("container", "mcp_servers"):
        if getattr(body, field):
            raise unsupported(field)
    conversation = translate_conversation(body.system, body.messages)
    effort, format_field, form = _output(body)
    thinking, display = _thinking(body.thinking)
    choice, parallel = chat_tool_choice(body.tool_choice)
    chat = ChatBody(
        messages=conversation.messages,
        tools=None if body.tools is None else chat_tools(body.tools),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        stop=body.stop_sequences,
        thinking=thinking,
        reasoning_effort=effort,
        response_format=form,
        continue_final_message=conversation.continues or None,
        **{name: getattr(body, name) for name in SAME},
    )
    translation = MessagesTranslation(
        chat, conversation.places, format_field, display != "omitted", conversation.warnings
    )
    with translation.renaming():
        check_chat(chat)
    return translation


def _thinking(thinking: Any) -> tuple[Any, Display]:
    """Return (the chat's field `thinking`, how thinking is displayed)."""
    if not isinstance(thinking, Mapping):
        return thinking, "summarized"
    display = thinking.get("display")
    if display not in (None, "summarized", "omitted"):
        raise InvalidRequest(
            f"thinking.display: must be one of summarized, omitted; got {display!r}",
            param="thinking.display",
        )
    rest = {name: value for name, value in thinking.items() if name != "display"}
    return rest, display or "summarized"


def _output(body: CountBody) -> tuple[Any, str, dict[str, Any] | None]:
    """Return (effort, path of the output format, response_format of the chat)."""
    config = members_of(body.output_config or {}, "output_config")
    known = ("effort", "format")
    for name, value in config.items():
        if name not in known and value is not None:
            raise unsupported(f"output_config.{name}", f"supported members: {', '.join(known)}")
    forms = {"output_config.format": config.get("format"), "output_format": body.output_format}
    formats = {field: form for field, form in forms.items() if form is not None}
    if len(formats) > 1:
        raise InvalidRequest(
            "output_format: cannot be combined with output_config.format; set only one of them",
            param="output_format",
        )
    for field, form in formats.items():
        return config.get("effort"), field, _form(form, field)
    return config.get("effort"), "output_config.format", None


def _form(form: Any, at: str) -> dict[str, Any]:
    form = members_of(form, at)
    if form.get("type") != "json_schema":
        raise InvalidRequest(
            f"{at}.type: must be json_schema; got {form.get('type')!r}", param=f"{at}.type"
        )
    return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
