"""Writes tools, calls and results as text, for chat templates that do not render them.

If a template does not render tools, the system message lists them and explains how to call one. If
it does not render calls, they become text in the model's tool format, or in the syntax of `hermes`.
So the calls in the model's output can be parsed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from gateway.prompt.content import ChatTurn, TurnCall, to_json


class CallText(msgspec.Struct, frozen=True):
    """How the calls of one answer are written as text."""

    before: str
    between: str
    after: str
    #: Calls are written as in Python; otherwise as objects with `name` and `arguments`.
    is_python: bool = False

    def write(self, calls: Sequence[TurnCall]) -> str:
        """Return the text of the calls."""
        written = map(_python_call if self.is_python else _json_call, calls)
        return f"{self.before}{self.between.join(written)}{self.after}"


HERMES = CallText("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
CALL_TEXTS: Mapping[str | None, CallText] = {
    "hermes": HERMES,
    "qwen3_json": HERMES,
    "granite": CallText("<|tool_call|>[", ", ", "]"),
    "lfm2": CallText("<|tool_call_start|>[", ", ", "]<|tool_call_end|>", is_python=True),
    "mistral": CallText("[TOOL_CALLS][", ", ", "]"),
}
"""Tool format -> how calls are written as text, for formats of templates that render no calls."""
_BEFORE = """# Tools

You may call one or more functions to help with the user's request. These are their signatures:
<tools>
"""
_AFTER = "\n</tools>"
_HOW = "\n\nTo call one, answer with its name and arguments in this form:\n"
_HOW_IN_HERMES = """

To call one, answer with its name and arguments as JSON between tags:
<tool_call>
{"name": "function-name", "arguments": {"name": "value"}}
</tool_call>"""
_EXAMPLE = TurnCall("function-name", {"name": "value"})


def describe_tools(
    turns: Sequence[ChatTurn],
    tools: Sequence[Mapping[str, Any]],
    tool_format: str,
    example: str,
) -> list[ChatTurn]:
    """Return the turns with the tools in the first system message.

    tool_format  the name of the model's tool format
    example      a call as the model's template writes it; "" if it writes none
    """
    how = ""
    if example:
        how = _HOW + example
    elif (call_text := CALL_TEXTS.get(tool_format)) is not None:
        is_hermes = call_text is HERMES
        how = _HOW_IN_HERMES if is_hermes else _HOW + call_text.write([_EXAMPLE])
    prompt = _BEFORE + "\n".join(to_json(tool) for tool in tools) + _AFTER + how
    first = turns[0]
    if first.role in ("system", "developer"):
        texts = [f"{first.text}\n\n{prompt}"]
        return [replace(first, texts=texts, has_parts=False), *turns[1:]]
    return [ChatTurn("system", [prompt]), *turns]


def calls_as_text(
    turns: Sequence[ChatTurn], tool_format: str | None, *, keeps_results: bool
) -> list[ChatTurn]:
    """Return the turns with all tool calls as text, and with all results as text of the user unless
    `keeps_results` is true. Calls and results must have ids.

    If an answer has several calls, each of its results says which of them it answers.
    """
    call_text = CALL_TEXTS.get(tool_format, HERMES)
    written: list[ChatTurn] = []
    #: Attributes of the calls of the last answer with calls, by their ids; none if it has only one.
    attributes: dict[str | None, str] = {}
    for turn in turns:
        if turn.calls:
            several = enumerate(turn.calls, 1) if len(turn.calls) > 1 else ()
            attributes = {
                call.id: f' call="{number}" name={to_json(call.name)}' for number, call in several
            }
        if turn.role == "tool" and not keeps_results:
            tag = f"tool_response{attributes.get(turn.call_id, '')}"
            turn = ChatTurn("user", [f"<{tag}>\n{turn.text}\n</tool_response>"])
        elif turn.calls:
            texts = [text for text in (turn.text, call_text.write(turn.calls)) if text]
            turn = replace(turn, texts=["\n".join(texts)], has_parts=False, calls=[])
        written.append(turn)
    return written


def _json_call(call: TurnCall) -> str:
    arguments = call.text if call.is_invalid else to_json(call.arguments)
    return f'{{"name": {to_json(call.name)}, "arguments": {arguments}}}'


def _python_call(call: TurnCall) -> str:
    if call.is_invalid:
        return f"{call.name}({call.text})"
    return f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})"
