"""Describes tools in the system message, for models whose chat template does not render tools.

The system message lists the tools and explains how to call one: as the template writes earlier
calls, or if it writes none, in the syntax of the tool format `hermes`. In the latter case, earlier
calls and their results become text in this syntax. So the calls in the model's output can be
parsed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gateway.prompt.content import ChatTurn, TurnCall, to_json

FORMATS = ("hermes", "qwen3_json")
"""Tool formats that parse calls in this syntax."""

EXAMPLE_NAME, EXAMPLE_ARGUMENTS = "function-name", {"name": "value"}
"""The call that the description shows as an example."""
_BEFORE = """# Tools

You may call one or more functions to help with the user's request. These are their signatures:
<tools>
"""
_AFTER = "\n</tools>"
_HOW = "\n\nTo call one, answer with its name and arguments in this form:\n"
_HOW_IN_WORDS = """

To call one, answer with its name and arguments as JSON between tags:
<tool_call>
{"name": "function-name", "arguments": {"name": "value"}}
</tool_call>"""


def describe_tools(
    turns: Sequence[ChatTurn],
    tools: Sequence[Mapping[str, Any]],
    example: str,
    *,
    in_words: bool,
) -> list[ChatTurn]:
    """Return the turns with the tools in the first system message.

    example   a call as the model's template writes it; "" if it writes none
    in_words  whether to explain the syntax of this module if there is no example
    """
    how = _HOW + example if example else _HOW_IN_WORDS if in_words else ""
    prompt = _BEFORE + "\n".join(to_json(tool) for tool in tools) + _AFTER + how
    first = turns[0]
    if first.role in ("system", "developer"):
        texts = [f"{first.text}\n\n{prompt}"]
        return [replace(first, texts=texts, has_parts=False), *turns[1:]]
    return [ChatTurn("system", [prompt]), *turns]


def in_words(turns: Sequence[ChatTurn], *, keeps_results: bool = False) -> list[ChatTurn]:
    """Return the turns with all tool calls as text, and with all results as text of the user unless
    `keeps_results` is true."""
    return [turn if keeps_results and turn.role == "tool" else _in_words(turn) for turn in turns]


def _in_words(turn: ChatTurn) -> ChatTurn:
    if turn.role == "tool":
        return ChatTurn("user", [f"<tool_response>\n{turn.text}\n</tool_response>"])
    if not turn.calls:
        return turn
    texts = [text for text in (turn.text, *map(_call, turn.calls)) if text]
    return replace(turn, texts=["\n".join(texts)], has_parts=False, calls=[])


def _call(call: TurnCall) -> str:
    arguments = call.text if call.is_invalid else to_json(call.arguments)
    return f'<tool_call>\n{{"name": {to_json(call.name)}, "arguments": {arguments}}}\n</tool_call>'
