"""Translates items into chat messages, and remembers their paths in the request.

- The items of one assistant turn (reasoning, text, calls, in any order) become one message, as in a
  chat. So the same conversation sent as items or as messages gives the same prompt.
- Two consecutive assistant messages stay separate.
- Instructions and the system or developer messages that directly follow them become one message,
  because most templates accept only one system message, at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.api.responses.items import Item, PlacedItem, reasoning_text
from protocol.errors import InvalidRequest

SYSTEM_ROLES = ("system", "developer")
INSTRUCTIONS = "instructions"
_BETWEEN_INSTRUCTIONS = "\n\n"
_BETWEEN_PARTS = "\n"


class ItemConversation:
    """The chat messages of a list of items.

    messages  the `messages` of a chat
    names     path prefix in the chat -> path prefix in the request
    """

    def __init__(self, instructions: str | None, items: Sequence[PlacedItem]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.names: dict[str, str] = {}
        self._said: str | None = None  # the kind of the last item of the assistant's open message
        if instructions:
            self._add({"role": "system", "content": instructions}, INSTRUCTIONS)
        for place, placed in enumerate(items):
            self._add_item(placed, is_first=not place)

    def _add_item(self, placed: PlacedItem, *, is_first: bool) -> None:
        item, at = placed.item, placed.at
        match item["type"]:
            case "reasoning":
                self._extend("reasoning", reasoning_text(item, at), placed)
            case "function_call":
                self._call(item, at)
            case "function_call_output":
                self._output(item, at)
            case _ if item["role"] == "assistant":
                self._extend("content", _joined(item["content"]), placed)
            case _ if item["role"] in SYSTEM_ROLES and self._follows_instructions():
                first = self.messages[0]
                first["content"] += _BETWEEN_INSTRUCTIONS + _joined(item["content"])
            case _:
                self._add({"role": item["role"], "content": _parts(item["content"])}, at)

    def _follows_instructions(self) -> bool:
        return len(self.messages) == 1 and self.names["messages[0]"] == INSTRUCTIONS

    def _add(self, message: dict[str, Any], at: str) -> str:
        """The message's own place in the chat."""
        own = f"messages[{len(self.messages)}]"
        self.names[own] = at
        self.messages.append(message)
        self._said = None
        return own

    def _assistant(self, kind: str, at: str) -> tuple[dict[str, Any], str]:
        """The open message, or a new one."""
        if self._said is None or (kind == self._said == "content"):
            self._add({"role": "assistant", "content": ""}, at)
        self._said = kind
        return self.messages[-1], f"messages[{len(self.messages) - 1}]"

    def _extend(self, kind: str, text: str, placed: PlacedItem) -> None:
        message, own = self._assistant(kind, placed.at)
        message[kind] = message.get(kind, "") + text
        self.names[f"{own}.{kind}"] = f"{placed.at}.content"

    def _call(self, item: Item, at: str) -> None:
        message, own = self._assistant("call", at)
        calls = message.setdefault("tool_calls", [])
        self.names[f"{own}.tool_calls[{len(calls)}].id"] = f"{at}.call_id"
        self.names[f"{own}.tool_calls[{len(calls)}].function"] = at
        function = {"name": item["name"], "arguments": item["arguments"]}
        calls.append({"id": item["call_id"], "type": "function", "function": function})

    def _output(self, item: Item, at: str) -> None:
        output, call_id = _parts(item["output"]), item["call_id"]
        own = self._add({"role": "tool", "tool_call_id": call_id, "content": output}, at)
        self.names[f"{own}.tool_call_id"] = f"{at}.call_id"
        self.names[f"{own}.content"] = f"{at}.output"


def check_outputs(items: Sequence[PlacedItem]) -> None:
    """Raise InvalidRequest if some calls of one turn have outputs and others have none. The model
    would continue as if it had never made the others."""
    answered = {
        placed.item["call_id"] for placed in items if placed.item["type"] == "function_call_output"
    }
    for calls in _calls_by_turn(items):
        missing = [call for call in calls if call not in answered]
        if missing and len(missing) < len(calls):
            raise InvalidRequest(
                f"input: the function call {missing[0]!r} has no output, but other calls of the "
                "same turn have one",
                param="input",
            )


def _calls_by_turn(items: Sequence[PlacedItem]) -> list[list[str]]:
    """Return the ids of calls, in groups separated by outputs or a user's messages."""
    groups: list[list[str]] = []
    goes_on = False
    for placed in items:
        item = placed.item
        if item["type"] == "function_call":
            if not goes_on:
                groups.append([])
            groups[-1].append(item["call_id"])
            goes_on = True
        elif item["type"] == "function_call_output" or item.get("role") == "user":
            goes_on = False
    return groups


def _parts(content: Any) -> Any:
    """A chat's content: text, or parts of text."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part["text"]} for part in content]


def _joined(content: Any) -> str:
    if isinstance(content, str):
        return content
    return _BETWEEN_PARTS.join(part["text"] for part in content)
