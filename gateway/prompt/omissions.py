"""Finds the texts of a conversation that a chat template omits.

Few templates omit texts without an error (`TemplateTraits.omits_texts`): some render only the last
message. Their conversations are rendered with a mark in place of each text first, because the texts
themselves may be changed by the template, or may occur in other messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.prompt.content import ChatTurn, TurnCall
from protocol.wire.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class MarkedConversation:
    """A conversation with a mark in place of each text."""

    turns: Sequence[ChatTurn]
    #: The request's tools and one more, whose name is a mark. None if there are none.
    tools: Sequence[Mapping[str, Any]] | None
    #: Mark -> path of the field that it stands for.
    paths: Mapping[str, str]

    def check(self, prompt: str) -> None:
        """Raise InvalidRequest, naming the field, if a mark is missing from the prompt."""
        for mark, path in self.paths.items():
            if mark not in prompt:
                raise InvalidRequest(
                    f"{path}: the model's chat template omits this in this conversation", param=path
                )


def marked(
    turns: Sequence[ChatTurn], tools: Sequence[Mapping[str, Any]] | None, param: str
) -> MarkedConversation:
    """Return a conversation with marks. `param` is the path of its messages."""
    paths: dict[str, str] = {}

    def mark(path: str) -> str:
        paths[found := f"m4rk{len(paths)}x"] = path
        return found

    def marked_call(call: TurnCall, path: str) -> TurnCall:
        return replace(call, arguments={"mark": mark(path)}, text=None)

    found = []
    for place, turn in enumerate(turns):
        at = f"{param}[{place}]"
        texts = [mark(f"{at}.content") if text else "" for text in turn.texts]
        calls = [marked_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(turn.calls)]
        found.append(replace(turn, texts=texts, calls=calls))
    if tools:
        tools = [*tools, {"type": "function", "function": _tool(mark("tools"))}]
    return MarkedConversation(found, tools, paths)


def _tool(name: str) -> dict[str, Any]:
    return {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}}
