"""Reads answers that are messages, each with a header that names its recipient (`harmony`).

    <|channel|>analysis<|message|>Thinking.<|end|>
    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>Hello.<|return|>

The states are:

    start      before the first message, whose `<|start|>assistant` the prompt has written
    header     in a header
    between    after a message
    content    in a message for the user
    reasoning  in a message of the model to itself
    call       in a message for a tool, whose body is the arguments' JSON
    tool       in a message for a tool, whose body has a tool syntax of its own
    calls      in a message for a tool, inside a group of calls in that syntax

The recipient decides the kind of a message. `to=functions.NAME` is a call, and so is `to=NAME` if
NAME is a tool of the request. A message to any other tool is reasoning, because the request does
not have that tool. Without a recipient the channel decides: `analysis` is reasoning, any other
channel is content. In Muse's answers `to=self` is reasoning, `to=user` or no recipient is content,
and any other recipient is a tool.

An answer that starts without a header is content. Two neighbouring messages of one kind are joined
with a line break. A spelt-out marker inside a string of the arguments has no meaning.

A model may leave out the markers between two messages. `harmony_header` describes how the next
header is then found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from gateway.formats.answer_parser import AnswerParser
from gateway.formats.call_parser import CallSyntax
from gateway.formats.event_builder import BLANKS, NEWLINES
from gateway.formats.events import Reasoning
from gateway.formats.harmony_header import (
    FUNCTIONS,
    HEADER_TEXT,
    HEADER_WORDS,
    MAX_HEADER_CHARS,
    ROLE,
    channel_in,
    header_start,
    recipient_in,
    role_start,
)
from gateway.formats.json_call import JsonExtent
from gateway.formats.parser import FormatParserState, Moves
from gateway.text.markers import match_end

if TYPE_CHECKING:
    from gateway.formats.harmony import Harmony


class HarmonyState(FormatParserState):
    """State of a `HarmonyParser`.

    header  text of the header so far, including its markers
    body    kind of the message that was open when the header started, because its end marker is
            missing; "" if no message was open
    role    held-back end of the message's text, because it may be the next header's role
    value   how far the JSON of the arguments has been scanned
    last    kind of the previous message
    first   whether the line break that separates this message from a previous one of the same kind
            has not been written yet
    spilt   whether this message to a tool has had text outside its calls
    """

    at: str = "start"
    header: str = ""
    body: str = ""
    role: str = ""
    value: JsonExtent = msgspec.field(default_factory=JsonExtent)
    last: str = ""
    first: bool = True
    spilt: bool = False


class HarmonyParser(AnswerParser):
    State = HarmonyState
    syntax: Harmony

    def call_syntax(self) -> CallSyntax | None:
        return self.syntax.calls

    def start(self, starts_inside: bool) -> None:
        if starts_inside:
            self._start_body("reasoning")

    def moves(self) -> Moves:
        x = self.syntax
        head = ((x.message, x.start, *x.in_header), self._in_header)
        ends = ((*x.ends, x.start), self._end_message)
        channel = (x.channel,) if x.channel else ()
        text = (ends, ((x.message, *channel), self._header_in_text))
        content = (*text, (x.signs(), self._sign_in_content))
        return {
            "start": (head,),
            "header": (head,),
            "between": (head, (x.ends, self.skip)),
            "content": content,
            "reasoning": text,
            "call": ((ends[0], self._marker_in_call),),
            "tool": ((x.calls.openers() if x.calls else (), self.open_calls), ends),
        }

    # ---- text

    def _between(self, text: str) -> str:
        rest = text if self.s.header else text.lstrip(BLANKS)
        return self._before_header(rest) if rest else ""

    def _header_text(self, text: str) -> str:
        """Read text of a header. Return the text that is not part of the header."""
        s = self.s
        brace = -1 if s.body or "{" in s.header else text.find("{")
        if brace >= 0 and self._start_bare_call(s.header + text[:brace]):
            return text[brace:]
        last_text = s.header.rpartition(">")[2] + text
        end = match_end(HEADER_TEXT, last_text) if s.body else len(last_text)
        room = MAX_HEADER_CHARS - len(s.header)
        read = min(end - (len(last_text) - len(text)), room)
        s.header += text[:read]
        if read < len(text):
            self._no_header()
        return text[read:]

    def _message_text(self, text: str) -> None:
        """Add content or reasoning. Hold back its end if that may be the next header's role."""
        s = self.s
        text = s.role + text
        end = role_start(text)
        s.role = text[end:]
        if end:
            self._emit(text[:end])

    def _end_text(self) -> None:
        """Emit the text that was held back because it could be a role."""
        role, self.s.role = self.s.role, ""
        if role:
            self._emit(role)

    def _before_header(self, text: str) -> str:
        """Read a header's text before its first marker. The prompt has written the header's start,
        or the model has left out markers.

        Text that cannot be a header starts content, and is read again as content.
        """
        s = self.s
        is_between = s.at == "between"
        before: str = s.header
        header = before + text
        end = match_end(header_start(self.syntax.channels if is_between else ()), header)
        rest = header[end:]
        may_call = is_between and rest[:1] == "{" and header.lstrip().startswith(ROLE)
        if may_call and self._start_bare_call(header[:end]):
            return rest
        words = (*HEADER_WORDS, *self.syntax.channels) if is_between else HEADER_WORDS
        may_continue = not rest or any(word.startswith(rest) for word in words)
        if may_continue and len(header) <= MAX_HEADER_CHARS:
            s.header = header
            return ""
        self._start_body("content")
        self._message_text(before)
        return text

    def _no_header(self) -> None:
        """Handle text that was read as a header but is not one: it is text of a message."""
        s = self.s
        header, body, s.header, s.body = s.header, s.body, "", ""
        if body != "reasoning":
            self._find_markup(header)
        if not body:
            self._start_body("content")
            self._emit(header)
            return
        s.at = body
        role, marker, rest = header.partition(self.syntax.channel)
        self._emit(role)
        self._marker_text(marker)
        self._message_text(rest)

    def _find_markup(self, header: str) -> None:
        """Report markup of calls in text that was read as a header."""
        for sign in (FUNCTIONS, *self.syntax.signs()):
            if sign in header and sign != self.syntax.channel:
                self.builder.found_markup(sign)

    def _emit(self, text: str) -> None:
        """Emit text of the current message.

        A line break separates the message from a previous one of the same kind.
        """
        s = self.s
        if s.at == "reasoning":
            if s.first and s.last == s.at and text.strip(NEWLINES):
                self.builder.out.append(Reasoning("\n"))
                s.first = False
            self.builder.reasoning(text)
            return
        if s.first and s.last == s.at and text:
            self.builder.content("\n")
            s.first = False
        self.builder.content(text)

    def _argument_text(self, text: str) -> None:
        self.builder.arguments_delta(text)
        value = self.s.value
        start = 0 if value.kind else len(text) - len(text.lstrip(BLANKS))
        while start < len(text) and (value.depth or value.quoted or not value.kind):
            start, status = value.scan(text, start)
            if status == "broken":
                start += 1

    def _emit_outside_calls(self, text: str) -> None:
        """Emit text outside of calls in a message for a tool, without the blanks before it."""
        if not self.s.spilt:
            text = text.lstrip(BLANKS)
            if not text:
                return
            self.s.spilt = True
            self.builder.parse_failed("a message to a tool that is not a call")
        self.builder.content(text)

    TEXT = {
        "start": _before_header,
        "header": _header_text,
        "between": _between,
        "content": _message_text,
        "reasoning": _message_text,
        "call": _argument_text,
        "tool": _emit_outside_calls,
        "calls": AnswerParser.read_calls,
    }

    # ---- markers

    def _marker_in_call(self, marker: str) -> None:
        if self.s.value.quoted and not self.context.lexicon.is_token(marker):
            self._argument_text(marker)
        else:
            self._end_message(marker)

    def _sign_in_content(self, marker: str) -> None:
        """Handle markup of calls in a message to the user."""
        self.builder.found_markup(marker)
        self._end_text()
        self._marker_text(marker)

    def _end_message(self, marker: str) -> None:
        if marker == self.syntax.call_end and self.s.at == "content":
            self.builder.found_markup(marker)
        self._end_body()
        if marker == self.syntax.start:
            self.s.at, self.s.header = "header", ""

    def _header_in_text(self, marker: str) -> None:
        """Handle a header's marker inside a message's text.

        If it is the channel marker or follows a role, the model has left out the markers between
        two messages, and the next header starts here. Otherwise the marker is text.
        """
        s = self.s
        has_role = s.role.startswith(ROLE)
        if not has_role:
            self._end_text()
        if marker == self.syntax.channel or has_role:
            s.body, s.header, s.role = s.at, s.role, ""
            self._in_header(marker)
        else:
            self._marker_text(marker)

    def _in_header(self, marker: str) -> None:
        s, x = self.s, self.syntax
        if marker == x.message:
            header, s.header = s.header, ""
            self._leave_body()
            self._start_message(header)
        elif marker == x.start:
            self._leave_body()
            s.at, s.header = "header", ""
        elif marker in x.in_header:
            s.at = "header"
            s.header += marker

    def _leave_body(self) -> None:
        """End the message in whose text a header started, if there is one."""
        s = self.s
        if s.body:
            s.at, s.body = s.body, ""
            self._end_body()

    def _start_message(self, header: str) -> None:
        """Start a message of the kind that its complete header announces."""
        x = self.syntax
        recipient = recipient_in(header)
        if not x.channel:
            self._start_body(self._kind_by_recipient(recipient))
        elif not recipient or recipient in x.user:
            is_reasoning = channel_in(header, x.channel).startswith(x.reasoning)
            self._start_body("reasoning" if is_reasoning else "content")
        elif recipient.startswith(FUNCTIONS) or self.builder.declares(recipient):
            self._start_call(recipient.removeprefix(FUNCTIONS))
        else:
            self._start_body("reasoning")

    def _start_bare_call(self, header: str) -> bool:
        """Start the call whose arguments follow `header` without `<|message|>`. Return whether
        there is such a call.

        The text may mean something else, so the tool must be a declared one.
        """
        x, recipient = self.syntax, recipient_in(header)
        name = recipient.removeprefix(FUNCTIONS)
        if not x.channel or not recipient or recipient in x.user:
            return False
        if len(header) > MAX_HEADER_CHARS or not self.builder.declares(name):
            return False
        self.s.header = ""
        self._start_call(name)
        return True

    def _kind_by_recipient(self, recipient: str) -> str:
        if recipient == self.syntax.reasoning:
            return "reasoning"
        return "content" if not recipient or recipient in self.syntax.user else "tool"

    def _start_body(self, kind: str) -> None:
        s = self.s
        s.at, s.header, s.first, s.spilt = kind, "", True, False
        if kind == "reasoning":
            self.builder.start_reasoning()

    def _start_call(self, name: str) -> None:
        self.s.at, self.s.value = "call", JsonExtent()
        self.builder.start_call(name)

    def _end_body(self) -> None:
        s = self.s
        self._end_text()
        if s.at == "reasoning":
            self.builder.end_reasoning()
        elif s.at == "call":
            self.builder.end_call()
        s.last, s.at = s.at, "between"

    def on_calls_done(self) -> None:
        self.s.at = "tool"

    def on_stray(self, marker: str) -> None:
        if self.s.at == "calls":
            self.read_call_token(marker)
        elif self.s.at == "header" and self.s.body and marker in self.syntax.ends:
            self._no_header()
            self.on_marker(marker)
        elif self.s.at in ("content", "reasoning"):
            self._end_text()
            self._marker_text(marker)

    def _marker_text(self, marker: str) -> None:
        """Emit a marker as text, or drop it.

        In reasoning it is text, because a model may discuss markup there. In content, a marker that
        is a token is dropped.
        """
        if self.s.at == "reasoning" or not self.context.lexicon.is_token(marker):
            self._emit(marker)

    # ---- the end

    def on_end(self, complete: bool) -> None:
        s = self.s
        if s.at == "calls":
            self.calls.end(complete)
        elif s.at == "call":
            self._end_last_call(complete)
        elif s.at in ("start", "header", "between") and complete and s.header.strip(BLANKS):
            self._no_header()
        if s.at in ("content", "reasoning"):
            self._end_text()
        if "reasoning" in (s.at, s.body):
            self.builder.end_reasoning()
        self.builder.finish()

    def _end_last_call(self, complete: bool) -> None:
        """End the last call. Its closing marker may be missing, because it also ends the answer."""
        if complete and self.builder.s.arguments.is_object:
            self.builder.end_call()
        elif complete:
            self.builder.parse_failed("the last tool call is not finished")
        self.builder.abandon_call()
