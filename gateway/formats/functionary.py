"""Functionary's answers: messages that start with the name of their recipient.

    all                                             the recipient of the answer proper
    I will look.>>>get_weather                      next, and a tool as the recipient
    {"city": "Oslo"}>>>now
    {}

The prompt has written the first `next`. In version 2.2, `next` and the end of the recipient's name
are made of special tokens:

    all
    <|content|>I will look.
    <|from|>assistant
    <|recipient|>get_weather
    <|content|>{"city": "Oslo"}

The states are:

    header   in a recipient's name
    named    after the name of a tool that the request does not have: if an object follows, this is
             a call, otherwise it is text
    content  in a message for the user
    call     in the JSON of a call's arguments
    raw      in arguments that are not an object, which are emitted unchanged
    between  after a call

A spelt-out `next` has no meaning in a string of the arguments. Text without a recipient is content.

Sources: the chat templates of Functionary 2.2 and 3.2.
"""

from __future__ import annotations

import re

import msgspec

from gateway.formats.answer_parser import AnswerParser, AnswerSyntax
from gateway.formats.event_builder import BLANKS, DeclaredTool
from gateway.formats.grammar_builder import (
    AnswerFrame,
    GrammarBuilder,
    NotWritable,
    either,
    sequence,
)
from gateway.formats.json_call import JsonExtent
from gateway.formats.parser import FormatParserState, Moves
from gateway.formats.string_limits import StringEscapes, free_of
from protocol.engine.grammar import Form, Pattern, Repeat, Until

EVERYONE = "all"
"""The recipient of the answer proper."""
NAME = re.compile(r"[\w.\-]{1,256}")
MAX_HEADER_CHARS = 256


class FunctionaryState(FormatParserState):
    """State of a `FunctionaryParser`.

    header  text of the current header so far, with the marker before it
    name    the recipient, in the state "named"
    value   how far the JSON of the arguments has been scanned
    spoke   whether there has been a message for the user
    """

    at: str = "header"
    header: str = ""
    name: str = ""
    value: JsonExtent = msgspec.field(default_factory=JsonExtent)
    spoke: bool = False


class FunctionaryParser(AnswerParser):
    State = FunctionaryState
    syntax: Functionary

    def start(self, starts_inside: bool) -> None:
        """Start in the first header, whose beginning the prompt has written."""

    def moves(self) -> Moves:
        x = self.syntax
        follows = ((x.next,), self._next)
        return {
            "header": (((x.name_end,), self._name_ended), follows),
            "content": (follows,),
            "call": (((x.next,), self._marker_in_call),),
            **dict.fromkeys(("named", "raw", "between"), (follows,)),
        }

    # ---- text

    def _in_header(self, text: str) -> str:
        s = self.s
        s.header += text
        if len(s.header) > MAX_HEADER_CHARS:
            self._no_header()
        return ""

    def _after_name(self, text: str) -> str:
        """Read the text after the name of an unknown tool."""
        s = self.s
        room = 2 * MAX_HEADER_CHARS - len(s.header)
        end = min(len(text) - len(text.lstrip(BLANKS)), room)
        s.header += text[:end]
        rest = text[end:]
        if rest.startswith("{"):
            self._start_call(s.name)
        elif rest:
            self._no_header()
        return rest

    def _arguments(self, text: str) -> str:
        s = self.s
        if not s.value.kind:
            text = text.lstrip(BLANKS)
            if text and text[0] != "{":
                s.at = "raw"
                return text
        position, status = s.value.scan(text)
        self.builder.arguments_delta(text[:position])
        if status == "end":
            self.builder.end_call()
            s.at = "between"
        elif status == "broken":
            s.at = "raw"
        return text[position:]

    def _between(self, text: str) -> str:
        rest = text.lstrip(BLANKS)
        if rest:
            self.builder.parse_failed("text between tool calls")
            self.s.at = "content"
        return rest

    TEXT = {
        "header": _in_header,
        "named": _after_name,
        "content": AnswerParser.as_content,
        "call": _arguments,
        "raw": AnswerParser.as_arguments,
        "between": _between,
    }

    # ---- markers

    def _next(self, marker: str) -> None:
        """Start the header of the next message."""
        s = self.s
        if s.at in ("header", "named") and s.header not in ("", marker):
            self._no_header()
        self._end_call()
        s.at, s.header = "header", marker

    def _marker_in_call(self, marker: str) -> None:
        if self.s.value.quoted and not self.context.lexicon.is_token(marker):
            self._arguments(marker)
        else:
            self._next(marker)

    def _name_ended(self, marker: str) -> None:
        s = self.s
        name = s.header.removeprefix(self.syntax.next).strip(BLANKS)
        s.header += marker
        if name == EVERYONE:
            s.at, s.header = "content", ""
            if s.spoke and not self.builder.s.blanks:
                self.builder.content("\n")
            s.spoke = True
        elif not NAME.fullmatch(name):
            self._no_header()
        elif self.builder.declares(name):
            self._start_call(name)
        else:
            s.at, s.name = "named", name

    def _no_header(self) -> None:
        """Handle text that was read as a header but is not one: it is content."""
        s = self.s
        header, s.header = s.header, ""
        if header.startswith(self.syntax.next):
            self.builder.found_markup(self.syntax.next)
        s.at = "content"
        self.builder.content(header)

    def _start_call(self, name: str) -> None:
        s = self.s
        s.at, s.header, s.value = "call", "", JsonExtent()
        self.builder.start_call(name)

    def _end_call(self) -> None:
        if self.builder.is_open:
            self.builder.end_call()

    # ---- the end

    def on_end(self, complete: bool) -> None:
        if complete and self.s.at in ("header", "named"):
            self._no_header()
        if complete and self.s.at == "raw":
            self._end_call()
        elif complete and self.builder.is_open:
            self.builder.parse_failed("the last tool call is not finished")
        self.builder.abandon_call()
        self.builder.finish()


class Functionary(AnswerSyntax, frozen=True, kw_only=True):
    """One version's spelling of messages."""

    PARSER = FunctionaryParser

    #: Text before the name of a message's recipient. The prompt has written the first one.
    next: str
    #: Text between the recipient's name and the message.
    name_end: str
    #: Text before `next`. Only the grammar uses it.
    line: str = ""
    #: Pattern of the texts that do not contain `next`. Only the grammar uses it.
    text: str

    def markers(self) -> tuple[str, ...]:
        return (self.next,)

    # ---- the grammar

    def frame(self) -> AnswerFrame:
        return AnswerFrame(before=EVERYONE + self.name_end)

    def write_required(self, grammar: GrammarBuilder) -> Form:
        def write(tool: DeclaredTool) -> Form:
            if not NAME.fullmatch(tool.name) or tool.name == EVERYONE:
                raise NotWritable(tool.name, "name", "this format cannot write it")
            return sequence(tool.name + self.name_end, grammar.arguments(tool))

        return grammar.several(grammar.call_rule(write), self.line + self.next)

    def write_strict(self, grammar: GrammarBuilder) -> Form:
        """Return the grammar of messages to the user, and of calls after the last of them."""
        others = Repeat(sequence(EVERYONE + self.name_end, Until(self.next)))
        answer = sequence(EVERYONE + self.name_end, Pattern(self.text))
        calls = grammar.rule("calls", self.write_required(grammar))
        return sequence(others, either((answer, calls)))


NEXT_V22 = "<|from|>assistant\n<|recipient|>"

FORMATS = {
    "functionary_v22": Functionary(
        next=NEXT_V22,
        name_end="\n<|content|>",
        line="\n",
        text=free_of((NEXT_V22,), StringEscapes()),
    ),
    "functionary_v32": Functionary(
        next=">>>", name_end="\n", text="(?s:(?:[^>]|>{1,2}[^>])*>{0,2})"
    ),
}
