"""Translates `system` and `messages` into chat messages, and records each message's request path.

- A turn of Anthropic's API is a list of blocks. Its text, calls and reasoning become one chat
  message. Each tool result becomes a message of its own. The order of the blocks is kept.
- Consecutive turns of one role are joined, as in Anthropic's API.
- Each tool call must have exactly one result, in the next turn.
- A call that Anthropic's service executed is in one turn with its result (service_calls.py).
- A `tool_reference` in a tool result, and the blocks `tool_addition` and `tool_removal` of a
  system message, become words about the tool (tools.py).
- In a user's turn, a block that is not text is refused. In a tool result, which the user cannot
  change, such a block is replaced by a line that names its type, and the response has a warning.

Errors are InvalidRequest and name the path of the invalid value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec

from gateway.api.anthropic.service_calls import (
    CALLS,
    NO_RESULT,
    RESULTS,
    service_result,
    tool_references,
)
from gateway.api.anthropic.signature import sealed_text
from gateway.api.anthropic.tools import ConversationTools
from gateway.api.openai.prepare import LEFT_OUT
from gateway.formats.events import OutputWarning
from gateway.http.json_values import as_object
from gateway.images.source import (
    NOTE,
    ImageSource,
    check_media_type,
    deferred,
    file_source,
    url_source,
)
from protocol.wire.errors import InvalidRequest
from protocol.wire.field_words import one_of

BILLING = "x-anthropic-billing-header:"
"""Prefix of a `system` block that Anthropic's clients send for billing. It is dropped, because it
changes with every request and would defeat the prefix cache."""

Block = Mapping[str, Any]


class ChatConversation(msgspec.Struct):
    """The chat messages made from the `system` and `messages` of a request."""

    #: The `messages` of a ChatBody.
    messages: list[dict[str, Any]] = []
    #: The path in the client's request at which each message starts.
    paths: list[str] = []
    warnings: list[OutputWarning] = []
    #: Whether the last turn is the assistant's, so that the answer continues it.
    continues: bool = False


def translate_conversation(
    system: Any, messages: Sequence[Any], tools: ConversationTools
) -> ChatConversation:
    """Return the chat messages for the values of a request's `system` and `messages`. Raise
    InvalidRequest, naming the path, if a value is invalid.

    tools  changed as the messages say
    """
    writer = _ConversationWriter(tools)
    if system is not None:
        writer.system(system)
    for place, message in enumerate(messages):
        writer.turn(message, f"messages[{place}]")
    return writer.finish()


class _OpenToolUse(NamedTuple):
    """A tool_use block without a result, and its path."""

    id: str
    name: str
    at: str


class _ConversationWriter:
    """Builds the chat messages, turn by turn."""

    def __init__(self, tools: ConversationTools) -> None:
        self.chat = ChatConversation()
        self._tools = tools
        #: The ids of all calls so far.
        self.call_ids: set[str] = set()
        #: The calls of the last turn that have no result yet. Some models repeat ids, so a result
        #: answers the first call with its id.
        self.unanswered: list[_OpenToolUse] = []
        #: The calls of this turn that Anthropic's service executed and that have no result yet.
        self.executed: list[_OpenToolUse] = []

    @property
    def blocks(self) -> Mapping[str, Mapping[str, Callable[[Block, str], None]]]:
        """Role -> type of block -> the method that adds such a block. If an attribute stored these
        bound methods, it would form a reference cycle."""
        return {
            "user": {
                **dict.fromkeys(_CONVERTERS, partial(self._text, "user")),
                "image": self._image,
                "tool_result": self._tool_result,
            },
            "assistant": {
                "text": partial(self._text, "assistant"),
                "thinking": self._thinking,
                "redacted_thinking": lambda block, at: None,  # encrypted by another server
                "tool_use": self._tool_use,
                **dict.fromkeys(CALLS, self._service_call),
                **dict.fromkeys(RESULTS, self._service_result),
            },
            "system": {
                "text": partial(self._text, "system"),
                "tool_addition": partial(self._tool_change, self._tools.on_addition),
                "tool_removal": partial(self._tool_change, self._tools.on_removal),
            },
        }

    def system(self, system: Any) -> None:
        texts = []
        for at, block in blocks_of(system, "system"):
            if block.get("type") != "text":
                raise unexpected(block.get("type"), at, ("text",))
            texts.append(string_member(block, "text", at))
        for text in texts:
            if text and not text.startswith(BILLING):
                self._add_text("system", text, "system")

    def turn(self, message: Any, at: str) -> None:
        message = as_object(message, at)
        role = message.get("role")
        by_role = self.blocks
        kinds = by_role.get(role) if isinstance(role, str) else None
        if kinds is None:
            raise InvalidRequest.wrong(f"{at}.role", one_of(by_role), role)
        blocks = blocks_of(message.get("content"), f"{at}.content")
        if role == "assistant":
            self._start_assistant(at)
        elif not blocks:
            self._current(role, at)
        for place, block in blocks:
            kind = block.get("type")
            write = kinds.get(kind) if isinstance(kind, str) else None
            if write is None:
                raise unexpected(kind, place, tuple(kinds))
            write(block, place)
        for use in self.executed:  # its result was not waited for
            self._add_result(use, [{"type": "text", "text": NO_RESULT}], use.at)
        self.executed = []
        self.chat.continues = self._last_role == "assistant"

    def finish(self) -> ChatConversation:
        self._check_answered()
        for message in self.chat.messages:
            if "reasoning" in message:
                message["reasoning"] = "\n\n".join(message["reasoning"])
        return self.chat

    # ---- turns

    def _current(self, role: str, at: str) -> dict[str, Any]:
        """Return the last message if it has this role, else append a new one."""
        if self._last_role != role:
            self._append({"role": role, "content": []}, at)
        return self.chat.messages[-1]

    @property
    def _last_role(self) -> str | None:
        """The role of the last message; None if there is no message yet."""
        role: str | None = self.chat.messages[-1]["role"] if self.chat.messages else None
        return role

    def _append(self, message: dict[str, Any], at: str) -> None:
        self.chat.messages.append(message)
        self.chat.paths.append(at)

    def _start_assistant(self, at: str) -> None:
        """Start or continue an assistant's turn. Before a new turn, all earlier calls must have a
        result."""
        if self._last_role != "assistant":
            self._check_answered()
        self._current("assistant", at)

    def _check_answered(self) -> None:
        for use in self.unanswered:
            raise InvalidRequest.at(
                use.at, f"the next message must have a tool_result for the tool_use {use.id!r}"
            )

    def _add_text(self, role: str, text: str, at: str) -> None:
        self._current(role, at)["content"].append({"type": "text", "text": text})

    # ---- blocks

    def _text(self, role: str, block: Block, at: str) -> None:
        self._add_text(role, block_text(block, at), at)

    def _image(self, block: Block, at: str) -> None:
        self._current("user", at)["content"].append(image_source(block, at))

    def _thinking(self, block: Block, at: str) -> None:
        """Add a thinking block. Its signature is not checked, but may hold its text."""
        text = string_member(block, "thinking", at)
        signature = block.get("signature")
        if not text and isinstance(signature, str):
            text = sealed_text(signature, f"{at}.signature")
        if text:
            self._current("assistant", at).setdefault("reasoning", []).append(text)

    def _tool_use(self, block: Block, at: str) -> None:
        use = self._call(block, at)
        self._tools.on_call(use.name)
        self.call_ids.add(use.id)
        self.unanswered.append(use)

    def _service_call(self, block: Block, at: str) -> None:
        self.executed.append(self._call(block, at))

    def _call(self, block: Block, at: str) -> _OpenToolUse:
        """Add a call to the assistant's message."""
        call_id, name = string_member(block, "id", at), string_member(block, "name", at)
        function = {"name": name, "arguments": as_object(block.get("input"), f"{at}.input")}
        calls = self._current("assistant", at).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})
        return _OpenToolUse(call_id, name, at)

    def _service_result(self, block: Block, at: str) -> None:
        call_id = string_member(block, "tool_use_id", at)
        use = next((use for use in self.executed if use.id == call_id), None)
        if use is None:
            problem = f"this message has no call with the id {call_id!r} before it"
            raise InvalidRequest.at(f"{at}.tool_use_id", problem)
        self.executed.remove(use)
        content = block.get("content")
        found = list(map(self._tools.on_reference, tool_references(content)))
        texts = found or [service_result(content)]
        self._add_result(use, [{"type": "text", "text": text} for text in texts], at)

    def _tool_result(self, block: Block, at: str) -> None:
        call_id = string_member(block, "tool_use_id", at)
        use = next((use for use in self.unanswered if use.id == call_id), None)
        if use is None:
            problem = f"the previous message has no tool_use with the id {call_id!r}"
            if call_id in self.call_ids:
                problem = f"the tool_use {call_id!r} already has a tool_result"
            raise InvalidRequest.at(f"{at}.tool_use_id", problem)
        self.unanswered.remove(use)
        self._add_result(use, self._result_parts(block, at), at)

    def _add_result(self, use: _OpenToolUse, parts: list[Any], at: str) -> None:
        message = {"role": "tool", "tool_call_id": use.id, "name": use.name, "content": parts}
        self._append(message, at)

    def _tool_change(self, on_change: Callable[[Any, str], str], block: Block, at: str) -> None:
        """Add the words about a tool that is added or removed."""
        words = on_change(block.get("tool"), f"{at}.tool")
        if words:
            self._add_text("system", words, at)

    def _result_parts(self, block: Block, at: str) -> list[Any]:
        content = block.get("content")
        texts: list[str | ImageSource] = []
        for place, inner in [] if content is None else blocks_of(content, f"{at}.content"):
            if inner.get("type") == "tool_reference":
                texts.append(self._tools.on_reference(string_member(inner, "tool_name", place)))
                continue
            if inner.get("type") == "image":
                texts.append(replace(image_source(inner, place), kind_at=place, note=NOTE))
                continue
            text, left_out = result_text(inner, place)
            if left_out is not None:
                problem = f"its type is {left_out!r} and this model reads text only"
                warning = OutputWarning(LEFT_OUT, f"{place}: left out, because {problem}")
                self.chat.warnings.append(warning)
            texts.append(text)
        is_error = block.get("is_error")
        if is_error is not None and not isinstance(is_error, bool):
            raise InvalidRequest.wrong(f"{at}.is_error", "true or false", is_error)
        first = texts[0] if texts else ""
        if is_error and not (isinstance(first, str) and first.lower().startswith("error")):
            texts.insert(0, "Error:")
        return [{"type": "text", "text": e} if isinstance(e, str) else e for e in texts]


def image_source(block: Block, at: str) -> ImageSource:
    """Return the source of an `image` block. Raise InvalidRequest, naming the path, if the block is
    malformed."""
    source, path = as_object(block.get("source"), f"{at}.source"), f"{at}.source"
    found: ImageSource
    match source.get("type"):
        case "base64":
            media_type, data = source.get("media_type"), string_member(source, "data", path)

            def checked() -> ImageSource:
                check_media_type(media_type, f"{path}.media_type")
                return ImageSource(f"{path}.data", base64=data)

            found = deferred(checked, f"{path}.data")
        case "url":
            url = string_member(source, "url", path)
            found = deferred(lambda: url_source(url, f"{path}.url"), f"{path}.url")
        case "file":
            name = string_member(source, "file_id", path)
            found = deferred(lambda: file_source(name, f"{path}.file_id"), f"{path}.file_id")
        case kind:
            raise unexpected(kind, path, ("base64", "url", "file"))
    return replace(found, kind_at=f"{at}.type", kind="image")


# ---- the text of blocks


def block_text(block: Block, at: str) -> str:
    """Return a block's text. Raise InvalidRequest if the block has none."""
    kind = block.get("type")
    convert = _CONVERTERS.get(kind) if isinstance(kind, str) else None
    if convert is not None:
        return convert(block, at)
    if kind == "image":
        raise _not_text(f"{at}.type", kind)
    raise unexpected(kind, at, tuple(_CONVERTERS))


def result_text(block: Block, at: str) -> tuple[str, str | None]:
    """Return (text, None) for a block of a tool result. If the model cannot read the block, return
    (a line that replaces the block, the block's type). Raise InvalidRequest, naming the path `at`,
    if the block is invalid."""
    kind = block.get("type")
    if not isinstance(kind, str):
        raise unexpected(kind, at, tuple(_CONVERTERS))
    is_readable = kind in _CONVERTERS and (
        kind != "document"
        or as_object(block.get("source"), f"{at}.source").get("type") in _TEXT_SOURCES
    )
    if is_readable:
        return block_text(block, at), None
    return f"[{kind} left out: this model reads text only]", kind


def _text(block: Block, at: str) -> str:
    return string_member(block, "text", at)


def _document(block: Block, at: str) -> str:
    at_source = f"{at}.source"
    source = as_object(block.get("source"), at_source)
    match source.get("type"):
        case "text":
            text = string_member(source, "data", at_source)
        case "content":
            text = _texts(source.get("content"), f"{at_source}.content")
        case kind:
            raise _not_text(f"{at_source}.type", kind)
    return _titled(block, at, ("title", "context"), text)


def _search_result(block: Block, at: str) -> str:
    return _titled(block, at, ("title", "source"), _texts(block.get("content"), f"{at}.content"))


def _texts(content: Any, at: str) -> str:
    texts = []
    for place, block in blocks_of(content, at):
        if block.get("type") != "text":
            raise _not_text(f"{place}.type", block.get("type"))
        texts.append(string_member(block, "text", place))
    return "\n".join(texts)


def _titled(block: Block, at: str, names: tuple[str, ...], text: str) -> str:
    """Return `text`, preceded by a line "name: value" for each member in `names` that is set."""
    given = [name for name in names if block.get(name) is not None]
    values = [(name, string_member(block, name, at)) for name in given]
    head = "".join(f"{name}: {value}\n" for name, value in values if value)
    return f"{head}\n{text}" if head else text


def _not_text(at: str, kind: Any) -> InvalidRequest:
    words = f"{one_of(('text',))}, because this model reads text only"
    return InvalidRequest.wrong(at, words, kind)


_CONVERTERS: Mapping[str, Callable[[Block, str], str]] = {
    "text": _text,
    "document": _document,
    "search_result": _search_result,
}
_TEXT_SOURCES = ("text", "content")
"""The types of a document's source that have text."""


# ---- members of JSON without a schema. `at` is the path of the value


def string_member(value: Mapping[str, Any], name: str, at: str) -> str:
    text = value.get(name)
    if not isinstance(text, str):
        raise InvalidRequest.wrong(f"{at}.{name}", "a string", text)
    return text


def blocks_of(content: Any, at: str) -> list[tuple[str, Block]]:
    """Return the (path, block) pairs of a content. A string is one text block."""
    if isinstance(content, str):
        return [(at, {"type": "text", "text": content})]
    if not isinstance(content, Sequence):
        raise InvalidRequest.wrong(at, "a string or a list of blocks", content)
    places = [f"{at}[{i}]" for i in range(len(content))]
    return [(at, as_object(block, at)) for at, block in zip(places, content, strict=True)]


def unexpected(kind: Any, at: str, known: Sequence[str]) -> InvalidRequest:
    """Return the error for an object at `at` whose `type` is not one of `known`."""
    return InvalidRequest.wrong(f"{at}.type", one_of(known), kind)
