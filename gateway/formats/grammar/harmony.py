"""Answers of messages with headers. The prompt has written the start of the first.

Whatever ends the last message may end the answer as well, as a token of its own that is no part of
any grammar; so it may always be missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.formats.event_builder import DeclaredTool
from gateway.formats.grammar.forms import FREE, either, optional, sequence, several
from gateway.formats.grammar.frame import Frame
from gateway.formats.grammar.writers import WRITERS
from gateway.formats.grammar_builder import GrammarBuilder
from gateway.formats.harmony import FUNCTIONS, Messages
from protocol.grammar import Form, Repeat, Until

ASSISTANT = "assistant"
JSON = "json"


def frame(syntax: Messages) -> Frame:
    return Frame(
        opens=_thoughts(syntax),
        closes=syntax.ends[0] + _next(syntax),
        before=_says(syntax)[0],
    )


def required(
    syntax: Messages, tools: Sequence[DeclaredTool], many: bool, book: GrammarBuilder
) -> Form:
    if syntax.calls is None:
        return _with_json(syntax, tools, many, book)
    opener = syntax.calls.openers()[0]
    stretch = WRITERS[type(syntax.calls)](syntax.calls, opener, tools, many, book)
    recipient = either(sequence(tool.name) for tool in tools)
    head = sequence(" to=", recipient, syntax.message + opener)
    return sequence(head, stretch, optional(sequence(syntax.ends[0])))


def strict(
    syntax: Messages, tools: Sequence[DeclaredTool], many: bool, book: GrammarBuilder
) -> Form:
    """Any messages to oneself and to the user; the last is one to the user, or calls."""
    ends = [end for end in syntax.ends if end != syntax.call_end]
    heads = either(map(sequence, (_thoughts(syntax), *_says(syntax))))
    others = Repeat(sequence(heads, either(map(Until, ends)), _next(syntax)))
    last = optional(either(map(sequence, ends)))
    answer = sequence(either(map(sequence, _says(syntax))), FREE, last)
    calls = book.rule("calls", required(syntax, tools, many, book))
    return sequence(others, either((answer, calls)))


def _with_json(
    syntax: Messages, tools: Sequence[DeclaredTool], many: bool, book: GrammarBuilder
) -> Form:
    call = book.rule("call", either(_call(syntax, tool, book) for tool in tools))
    end = syntax.call_end
    calls = several(call, end + _next(syntax), many=many)
    return sequence(calls, optional(sequence(end)))


def _call(syntax: Messages, tool: DeclaredTool, book: GrammarBuilder) -> Form:
    """The recipient stands in the channel when models write, and before it in some templates."""
    recipient, channel = f" to={FUNCTIONS}{tool.name}", syntax.channel + syntax.asks
    head = either(map(sequence, (channel + recipient, recipient + channel)))
    kind = optional(sequence(syntax.in_header[-1]))
    return sequence(head, " ", kind, JSON + syntax.message, book.arguments(tool))


def _next(syntax: Messages) -> str:
    """What begins a message, up to where the prompt leaves the first one to the model."""
    return syntax.start + ASSISTANT


def _thoughts(syntax: Messages) -> str:
    return _head(syntax, syntax.thoughts)


def _says(syntax: Messages) -> tuple[str, ...]:
    """The heads of messages to the user; that of the answer proper is the first."""
    return tuple(_head(syntax, whom) for whom in syntax.says or syntax.user)


def _head(syntax: Messages, whom: str) -> str:
    return (syntax.channel or " to=") + whom + syntax.message
