"""Checks which formats parse what a chat template writes.

A template writes earlier answers into prompts (`prompt.written`). They are encoded with the model's
tokenizer and parsed like an answer that the model has just generated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from gateway.formats.choice_parser import AnswerOptions, ParserFactory
from gateway.formats.events import Content, Event, Reasoning, ToolArguments, ToolCall, merged
from gateway.formats.reasoning import REASONING, ends_inside
from gateway.formats.registry import (
    REASONING_OF_ANSWER_SYNTAX,
    TOOLS,
    Format,
    bind,
    format_of,
)
from gateway.prompt.written import ANSWER, CALLS, THOUGHT, WrittenTurn, WrittenTurns
from gateway.text.tokenizer import Tokenizer
from protocol.engine.messages import Output
from protocol.wire.errors import ServingError


def _never(name: str, turn: WrittenTurn) -> bool:
    return False


class RenderedAnswers(msgspec.Struct, frozen=True):
    """Answers that a template has rendered, and the formats that may parse them."""

    #: What the answers consist of, for explanations.
    kind: str = ""
    #: The answers. Each one contains what the one before contains, and more.
    turns: tuple[WrittenTurn, ...] = ()
    #: All that the template has rendered for calls and reasoning.
    text: str = ""
    #: Names of all formats.
    names: Collection[str] = ()
    #: Whether the format of this name parses a turn.
    parses: Callable[[str, WrittenTurn], bool] = _never


class RoundTrip:
    """Parses the turns that a model's template writes, to find the format that reads them.

    written    what the template writes
    tokenizer  the model's tokenizer
    """

    def __init__(self, written: WrittenTurns, tokenizer: Tokenizer) -> None:
        self._written = written
        self._tokenizer = tokenizer

    def reasoning(self) -> RenderedAnswers:
        """Return the answer with reasoning."""
        names = [*REASONING, *REASONING_OF_ANSWER_SYNTAX]
        turns = _known([self._written.reasoning])
        return RenderedAnswers("reasoning", turns, self._text(), names, self._parses_reasoning)

    def calls(self, reasoning: str | None) -> RenderedAnswers:
        """Return the answers with one and with two calls.

        reasoning  name of the model's reasoning format
        """

        def parses(name: str, turn: WrittenTurn) -> bool:
            return self._parses_calls(name, reasoning, turn)

        turns = _known([self._written.call, self._written.calls])
        return RenderedAnswers("calls", turns, self._text(), TOOLS, parses)

    def _text(self) -> str:
        written = self._written
        return "".join(t.text for t in _known([written.call, written.calls, written.reasoning]))

    def _parses_calls(self, tools: str, reasoning: str | None, turn: WrittenTurn) -> bool:
        """Return whether a format parses the calls of a turn: the first of CALLS, and the second
        one if the turn has it."""
        events = self._events(tools, reasoning, turn)
        names = [event.name for event in events if isinstance(event, ToolCall)]
        texts = [event.fragment for event in events if isinstance(event, ToolArguments)]
        wanted = [(name, given) for name, given in CALLS if name in turn.text]
        return names == [name for name, _ in wanted] and list(map(_json, texts)) == [
            given for _, given in wanted
        ]

    def _parses_reasoning(self, reasoning: str, turn: WrittenTurn) -> bool:
        """Return whether a format parses THOUGHT as reasoning and ANSWER, if the turn has it, as
        the beginning of the content."""
        events = self._events(None, reasoning, turn)
        thoughts = "".join(event.text for event in events if isinstance(event, Reasoning))
        content = "".join(event.text for event in events if isinstance(event, Content))
        begins = ANSWER not in turn.answer or content.lstrip().startswith(ANSWER)
        return thoughts.strip() == THOUGHT and begins

    def _events(
        self, tools: str | None, reasoning: str | None, turn: WrittenTurn
    ) -> Sequence[Event]:
        """Return the events of a turn's answer; none if the two formats cannot be combined."""
        try:
            return parse_turn(format_of(tools, reasoning), turn, self._tokenizer)
        except (ValueError, ServingError):
            return []


def parse_turn(format: Format, turn: WrittenTurn, tokenizer: Tokenizer) -> Sequence[Event]:
    """Return the merged events of a turn's answer, up to the first end token. Raise
    InvalidRequest or ContextTooLong if the answer cannot be encoded."""
    inside = format.reasoning is not None and ends_inside(turn.opening, format.reasoning) is True
    options = AnswerOptions(
        format=bind(format, tokenizer), starts_inside=inside, new_id=lambda: "id"
    )
    parser = ParserFactory(tokenizer, None, options).new()
    tokens = tokenizer.encode(turn.answer, False)
    ends = (at for at, token in enumerate(tokens) if token in tokenizer.eos_token_ids)
    answer = tokens[: next(ends, None)]
    events = parser.push(Output(request=1, tokens=answer)).events
    return merged([*events, *parser.push(Output(request=1, finish="stop")).events])


def _known(turns: Sequence[WrittenTurn | None]) -> tuple[WrittenTurn, ...]:
    return tuple(turn for turn in turns if turn is not None)


def _json(text: str) -> Any:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None
