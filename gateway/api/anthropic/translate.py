"""Translates a Messages request into a chat request, and field paths of the chat back.

Fields that both requests have are copied. Errors are InvalidRequest and name the fields of the
client's request. `openai.tools` checks what both APIs share: names, schemas, and whether the chosen
tool exists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from gateway.api.anthropic.conversation import (
    string_member,
    translate_conversation,
    unexpected,
)
from gateway.api.anthropic.requests import CountBody
from gateway.api.anthropic.tools import TOOL_LEFT_OUT, ConversationTools
from gateway.api.openai.checks import check_chat
from gateway.api.openai.field_paths import NO_FIELDS, translate_errors
from gateway.api.openai.requests import ChatBody, unsupported
from gateway.formats.events import OutputWarning
from gateway.formats.model_format import ModelOutputFormat
from gateway.http.errors import ThreadsUnsupported
from gateway.http.json_values import as_object, check_depth
from gateway.prompt.kwargs import ThinkingFields, thinking_budget
from protocol.wire.errors import InvalidRequest
from protocol.wire.field_words import one_of

NO_BUDGET = "thinking_budget_not_kept"
"""Code of the warning about a thinking budget that has no effect."""
DISPLAYS = ("summarized", "omitted", "updates")
"""Ways to display thinking. There are no summaries, so all but "omitted" mean its text."""
_WITHOUT_EFFECT: Mapping[str, str] = {
    "container": "this server runs no code",
    "mcp_servers": "this server connects to no MCP servers",
}
"""Fields for services that this server does not have, and why. They are left out with a warning,
because agents send them to every server."""
_TRANSLATED = frozenset({"messages", "tools", "tool_choice", "thinking"})
_SHARED = frozenset(CountBody.__struct_fields__) & frozenset(ChatBody.__struct_fields__)
COPIED_FIELDS = _SHARED - _TRANSLATED
"""Fields that both requests have with the same meaning. They are copied."""
_TOOL_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
_TOOL_MEMBERS = {  # pattern of a path within a chat's tool -> path within the client's tool
    r"^\.function\.parameters": ".input_schema",
    r"^\.function\b": "",
}
_CHOICE_PATHS = {r"^tool_choice\.function\.name$": "tool_choice.name"}
_PLACE = re.compile(r"^messages\[(\d+)\]")
_TOOL = re.compile(r"^tools\[(\d+)\]")


class MessagesTranslation(msgspec.Struct, frozen=True):
    """A Messages request, translated into a chat request."""

    chat: ChatBody
    #: The path in the client's request of each chat message.
    paths: list[str]
    #: The path in the client's request of each tool of the chat.
    tool_paths: list[str]
    #: The tools that the start of the prompt defines.
    shown_tools: list[dict[str, Any]]
    #: The path of the field that sets the answer's format.
    format_field: str
    #: Include the text of thinking blocks in the response.
    shows_thinking: bool
    #: Warnings about the request.
    warnings: list[OutputWarning]
    #: Paths of fields without effect.
    ignored: list[str]

    def translate_errors(
        self, engine_fields: Mapping[str, str] = NO_FIELDS
    ) -> AbstractContextManager[None]:
        """Return a context manager that translates the field paths in errors raised inside its
        block: from paths of the chat request to paths of the client's request. `engine_fields` has
        the chat's paths for the engine's names."""
        return translate_errors(self.request_path, engine_fields)

    def request_path(self, name: str) -> str:
        """Return the path in the client's request for `name`, a field path of the chat request."""
        if (found := _PLACE.match(name)) and int(found[1]) < len(self.paths):
            return self.paths[int(found[1])]
        if found := _TOOL.match(name):
            member, place = name[found.end() :], int(found[1])
            for pattern, own in _TOOL_MEMBERS.items():
                member = re.sub(pattern, own, member)
            return (self.tool_paths[place] if place < len(self.tool_paths) else found[0]) + member
        for pattern, own in {**_CHOICE_PATHS, **self._format_paths()}.items():
            name = re.sub(pattern, own, name)
        return name

    def _format_paths(self) -> Mapping[str, str]:
        return {
            r"^response_format\.json_schema\b": self.format_field,
            r"^response_format\b": self.format_field,
            r"^reasoning_effort$": "output_config.effort",
            r"^stop\b": "stop_sequences",
            r"^continue_final_message$": "messages",
        }


def translate(body: CountBody) -> MessagesTranslation:
    """Translate a body and check the resulting chat request. Raise InvalidRequest, naming the field
    of the body, if a value is invalid or not supported."""
    for field in ("messages", "system", "tools", "output_config", "output_format", "thinking"):
        check_depth(getattr(body, field), field)
    if body.thread is not None:
        raise ThreadsUnsupported.at(
            "thread", "this server stores no conversations; send all messages without this field"
        )
    tools = ConversationTools(body.tools)
    conversation = translate_conversation(body.system, body.messages, tools)
    effort, format_field, form = _output(body)
    thinking, display = _thinking(body.thinking)
    choice, parallel = _chat_tool_choice(body.tool_choice, tools)
    offered = tools.offered
    chat = ChatBody(
        messages=conversation.messages,
        tools=None if body.tools is None and not offered else [tool.chat for tool in offered],
        tool_choice=choice,
        parallel_tool_calls=parallel,
        stop=body.stop_sequences,
        thinking=thinking,
        reasoning_effort=effort,
        response_format=form,
        continue_final_message=conversation.continues or None,
        **{name: getattr(body, name) for name in COPIED_FIELDS},
    )
    ignored = [field for field in _WITHOUT_EFFECT if getattr(body, field)]
    left_out = [
        OutputWarning(TOOL_LEFT_OUT, f"{field}: left out, because {_WITHOUT_EFFECT[field]}")
        for field in ignored
    ]
    translation = MessagesTranslation(
        chat=chat,
        paths=conversation.paths,
        tool_paths=[tool.at for tool in offered],
        shown_tools=tools.at_start,
        format_field=format_field,
        shows_thinking=display != "omitted",
        warnings=[*left_out, *tools.warnings, *conversation.warnings],
        ignored=[*ignored, *tools.ignored],
    )
    with translation.translate_errors():
        check_chat(chat)
    return translation


def _thinking(thinking: Any) -> tuple[Any, str]:
    """Return (the value of the chat's field `thinking`, how to display thinking)."""
    if not isinstance(thinking, Mapping):
        return thinking, "summarized"
    display = thinking.get("display")
    if display is not None and display not in DISPLAYS:
        raise InvalidRequest.wrong("thinking.display", one_of(DISPLAYS), display)
    rest = {name: value for name, value in thinking.items() if name != "display"}
    return rest, display or "summarized"


def _output(body: CountBody) -> tuple[Any, str, dict[str, Any] | None]:
    """Return (effort, path of the field with the output format, `response_format` of the chat)."""
    config = as_object(body.output_config or {}, "output_config")
    known = ("effort", "format")
    for name, value in config.items():
        if name not in known and value is not None:
            raise unsupported(f"output_config.{name}", f"supported members: {', '.join(known)}")
    forms = {"output_config.format": config.get("format"), "output_format": body.output_format}
    formats = {field: form for field, form in forms.items() if form is not None}
    if len(formats) > 1:
        raise InvalidRequest.at(
            "output_format", "cannot be combined with output_config.format; set only one of them"
        )
    for field, form in formats.items():
        return config.get("effort"), field, _form(form, field)
    return config.get("effort"), "output_config.format", None


def _form(form: Any, at: str) -> dict[str, Any]:
    form = as_object(form, at)
    if form.get("type") != "json_schema":
        raise InvalidRequest.wrong(f"{at}.type", one_of(("json_schema",)), form.get("type"))
    return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}


# ---- tools


def _chat_tool_choice(
    choice: Any, tools: ConversationTools
) -> tuple[str | dict[str, Any] | None, bool | None]:
    """Return the values of (tool_choice, parallel_tool_calls) in the chat. A deferred tool that
    must be called is offered. Raise InvalidRequest if only a tool that is left out could be
    called."""
    if choice is None:
        return None, None
    choice = as_object(choice, "tool_choice")
    kind = choice.get("type")
    alone = choice.get("disable_parallel_tool_use")
    if alone is not None and not isinstance(alone, bool):
        raise InvalidRequest.wrong("tool_choice.disable_parallel_tool_use", "true or false", alone)
    parallel = None if alone is None else not alone
    if kind == "tool":
        name = string_member(choice, "name", "tool_choice")
        tools.check_not_left_out(name)
        tools.on_call(name)
        return {"type": "function", "function": {"name": name}}, parallel
    if not isinstance(kind, str) or kind not in _TOOL_CHOICES:
        raise unexpected(kind, "tool_choice", (*_TOOL_CHOICES, "tool"))
    if kind == "any":
        tools.check_not_left_out()
    return _TOOL_CHOICES[kind], parallel


# ---- limits of the model


def without_unkept_budget(
    chat: ChatBody, output_format: ModelOutputFormat
) -> tuple[ChatBody, list[OutputWarning]]:
    """Return (the request without a thinking budget that nothing would keep, warnings about that).

    Clients of this API also send a thinking budget to models without a reasoning format.
    """
    fields = chat.thinking_fields
    may_drop = output_format.reasoning is None and fields != ThinkingFields()
    budget = thinking_budget(fields) if may_drop else None
    if not budget:
        return chat, []
    message = (
        f"{budget[0]}: ignored, because this model's reasoning format is unknown; leave the "
        "field out, or restart the server with --reasoning-format"
    )
    chat = msgspec.structs.replace(
        chat, thinking=_without_budget(chat.thinking), thinking_token_budget=None
    )
    return chat, [OutputWarning(NO_BUDGET, message)]


def _without_budget(thinking: object) -> object:
    if not isinstance(thinking, Mapping):
        return thinking
    return {name: value for name, value in thinking.items() if name != "budget_tokens"}
