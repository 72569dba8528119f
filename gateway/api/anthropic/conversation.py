"""Translates `system` and `messages` into chat messages, and remembers their paths.

Anthropic's turns have blocks. A chat's messages have text, calls and reasoning, and each tool
result is a message of its own. Blocks keep their order. Consecutive turns of one role are one turn,
as in Anthropic's API. Each call must be answered exactly once, in the next turn; otherwise the
error names the block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.api.anthropic.pieces import (
    blocks_of,
    members_of,
    text_in,
    text_of_block,
    unexpected,
)
from gateway.api.anthropic.text_blocks import readable, result_text
from gateway.formats.events import OutputWarning
from protocol.errors import InvalidRequest

LEFT_OUT = "content_left_out"
BILLING = "x-anthropic-billing-header:"
"""Prefix of a `system` block that Anthropic's clients send for billing. It is dropped, because it
changes with every request and would defeat the prefix cache."""

Block = Mapping[str, Any]


class Chat(msgspec.Struct):
    """The translated conversation.

    messages   the `messages` of a ChatBody
    places     for each message, the path in the request where it starts
    continues  the last turn is the assistant's, and the answer continues it
    """

    messages: list[dict[str, Any]] = []
    places: list[str] = []
    warnings: list[OutputWarning] = []
    continues: bool = False


def translate_conversation(system: Any, messages: Sequence[Any]) -> Chat:
    """Translate a conversation. Raise InvalidRequest naming the path of the invalid value."""
    writer = _ConversationWriter()
    if system is not None:
        writer.system(system)
    for place, message in enumerate(messages):
        writer.turn(message, f"messages[{place}]")
    return writer.finish()


class _ConversationWriter:
    """Builds the chat messages, turn by turn.

    names       call id -> tool name, for all calls so far
    unanswered  call id -> path of the block, for calls of the last turn without a result
    """

    def __init__(self) -> None:
        self.chat = Chat()
        self.names: dict[str, str] = {}
        self.unanswered: dict[str, str] = {}
        self.blocks: Mapping[str, Mapping[str, Callable[[Block, str], None]]] = {
            "user": {
                "text": self._user_block,
                "document": self._user_block,
                "search_result": self._user_block,
                "image": self._user_block,
                "tool_result": self._tool_result,
            },
            "assistant": {
                "text": self._assistant_text,
                "thinking": self._thinking,
                "redacted_thinking": self._redacted_thinking,
                "tool_use": self._tool_use,
            },
            "system": {"text": self._system_text},
        }

    def system(self, system: Any) -> None:
        texts = [
            text_of_block(block, at) if block.get("type") == "text" else _refuse_system(block, at)
            for at, block in blocks_of(system, "system")
        ]
        texts = [text for text in texts if text and not text.startswith(BILLING)]
        for text in texts:
            self._add_text("system", text, "system")

    def turn(self, message: Any, at: str) -> None:
        message = members_of(message, at)
        role = message.get("role")
        kinds = self.blocks.get(role) if isinstance(role, str) else None
        if kinds is None:
            raise InvalidRequest(
                f"{at}.role: must be one of {', '.join(self.blocks)}; got {role!r}",
                param=f"{at}.role",
            )
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
        self.chat.continues = role == "assistant"

    def finish(self) -> Chat:
        self._check_answered()
        for message in self.chat.messages:
            if "reasoning" in message:
                message["reasoning"] = "\n\n".join(message["reasoning"])
        return self.chat

    # ---- turns

    def _current(self, role: str, at: str) -> dict[str, Any]:
        """Return the last message if it has this role, else append a new one."""
        messages = self.chat.messages
        if not messages or messages[-1]["role"] != role:
            messages.append({"role": role, "content": []})
            self.chat.places.append(at)
        return messages[-1]

    def _start_assistant(self, at: str) -> None:
        messages = self.chat.messages
        if not messages or messages[-1]["role"] != "assistant":
            self._check_answered()
        self._current("assistant", at)

    def _check_answered(self) -> None:
        for call_id, at in self.unanswered.items():
            raise InvalidRequest(
                f"{at}: the next message must have a tool_result for the tool_use {call_id!r}",
                param=at,
            )

    def _add_text(self, role: str, text: str, at: str) -> None:
        self._current(role, at)["content"].append({"type": "text", "text": text})

    # ---- blocks

    def _user_block(self, block: Block, at: str) -> None:
        self._add_text("user", readable(block, at), at)

    def _system_text(self, block: Block, at: str) -> None:
        self._add_text("system", text_of_block(block, at), at)

    def _assistant_text(self, block: Block, at: str) -> None:
        self._add_text("assistant", text_of_block(block, at), at)

    def _thinking(self, block: Block, at: str) -> None:
        """Add thinking. Its signature is not checked."""
        text = text_in(block, "thinking", at)
        if text:
            self._current("assistant", at).setdefault("reasoning", []).append(text)

    def _redacted_thinking(self, block: Block, at: str) -> None:
        """Ignore thinking that another server encrypted."""

    def _tool_use(self, block: Block, at: str) -> None:
        call_id, name = text_in(block, "id", at), text_in(block, "name", at)
        if call_id in self.names:
            raise InvalidRequest(
                f"{at}.id: an earlier tool_use has the id {call_id!r} too", param=f"{at}.id"
            )
        self.names[call_id], self.unanswered[call_id] = name, at
        arguments = members_of(block.get("input"), f"{at}.input")
        function = {"name": name, "arguments": arguments}
        calls = self._current("assistant", at).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _tool_result(self, block: Block, at: str) -> None:
        call_id = text_in(block, "tool_use_id", at)
        if self.unanswered.pop(call_id, None) is None:
            problem = f"the previous message has no tool_use with the id {call_id!r}"
            if call_id in self.names:
                problem = f"the tool_use {call_id!r} already has a tool_result"
            raise InvalidRequest(
                f"{at}.tool_use_id: {problem}",
                param=f"{at}.tool_use_id",
            )
        message = {
            "role": "tool",
            "tool_call_id": call_id,
            "name": self.names[call_id],
            "content": self._result_parts(block, at),
        }
        self.chat.messages.append(message)
        self.chat.places.append(at)

    def _result_parts(self, block: Block, at: str) -> list[dict[str, str]]:
        content = block.get("content")
        texts = []
        for place, inner in [] if content is None else blocks_of(content, f"{at}.content"):
            text, left_out = result_text(inner, place)
            if left_out is not None:
                self.chat.warnings.append(
                    OutputWarning(
                        LEFT_OUT,
                        f"{place}: left out, because its type is {left_out!r} and this model reads "
                        "text only",
                    )
                )
            texts.append(text)
        if _flag(block, "is_error", at) and not "".join(texts[:1]).lower().startswith("error"):
            texts.insert(0, "Error:")
        return [{"type": "text", "text": text} for text in texts]


def _flag(block: Block, name: str, at: str) -> bool:
    value = block.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{at}.{name}: must be true or false", param=f"{at}.{name}")
    return bool(value)


def _refuse_system(block: Block, at: str) -> str:
    raise unexpected(block.get("type"), at, ("text",))
