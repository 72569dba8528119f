"""Calls as Python writes them: `[f(a=1, b="x"), g()]`.

    opened   behind the marker, or at the `[` where there is none: a bracket, or the first name
    name     a function's name, up to its parenthesis
    key      in a call: an argument's name, up to `=`, or the closing parenthesis
    value    a literal, rewritten as JSON while it is read (literal.PythonScan)
    after    behind a value: a comma or the closing parenthesis
    between  behind a call: a comma, a line break, another name, or the end of the list
    end      behind the list: the closing marker
    broken   what follows is no call; up to the closing marker it is told as it stands

A `[` at the very beginning of an answer opens a list of calls only if the name of a tool of the
request, a parenthesis, and an argument's name with `=` or the closing parenthesis follow: otherwise
it is content, such as `[f(x) for x in y]`. Elsewhere, arguments without a name are no call of
ours: what follows is told as the model wrote it, and the arguments are no JSON.

Sources: the model cards of Llama 3.2 and 4, LFM2 and OLMo 3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.formats.event_builder import BLANKS, PARSE_FAILED, EventBuilder
from gateway.formats.literal import PythonScan
from gateway.formats.parser import CallParser, Context, MachineState, SectionSyntax
from gateway.formats.patterns import past

MAX_NAME_CHARS = 256
NAME_CHARS = re.compile(r"[\w.\-]*+")
NAME = re.compile(r"[^\W\d][\w.\-]*+")


class Pythonic(SectionSyntax, frozen=True, kw_only=True):
    """open      markers that begin a list of calls
    close     markers that end it
    bare      a `[` at the beginning of an answer does so, too
    brackets  the list stands in brackets; otherwise calls follow each other, in lines
    """

    open: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    bare: bool = False
    brackets: bool = True

    def markers(self) -> tuple[str, ...]:
        return self.open + self.close

    def openers(self) -> tuple[str, ...]:
        return self.open

    def start_openers(self) -> tuple[str, ...]:
        return ("[",) if self.bare else ()

    def section(
        self, context: Context, teller: EventBuilder, state: Mapping[str, Any] | None = None
    ) -> CallParser:
        return PythonicSection(self, context, teller, state)


class PythonicState(MachineState):
    """word     the name at hand, as far as it is read
    count    arguments of the open call so far
    literal  the value at hand
    bare     the list began with its bracket; no marker will end it
    call     name of a bare list's first call, until an argument shows that it is one
    raw      the text until a call is told: it may have to be given back
    """

    at: str = "opened"
    word: str = ""
    count: int = 0
    literal: PythonScan = msgspec.field(default_factory=PythonScan)
    bare: bool = False
    call: str = ""
    raw: list[str] = []


class PythonicSection(CallParser):
    syntax: Pythonic

    State = PythonicState

    def table(self) -> Mapping[str, tuple[str, ...]]:
        x = self.syntax
        states = ("opened", "name", "key", "value", "after", "between", "end", "broken")
        return dict.fromkeys(states, x.close + x.open)

    def on_open(self, marker: str) -> None:
        s = self.s
        s.raw = [marker]
        if marker == "[" and marker not in self.syntax.open:
            s.bare, s.at = True, "name"

    # ---- text

    def on_text(self, text: str) -> str:
        s = self.s
        if s.at == "value":
            return self._in_value(text)
        if s.at == "broken":
            self._tell_broken(text)
            return ""
        if s.word:
            return self._in_word(text)
        rest = text.lstrip(BLANKS)
        self._keep(text[: len(text) - len(rest)])
        return self._next(rest) if rest else ""

    def _keep(self, text: str) -> None:
        """Until a call is told, its text may have to be given back."""
        if self.s.raw and text:
            self.s.raw.append(text)

    def _next(self, text: str) -> str:
        """The first character that is no blank, outside words and values."""
        char, s = text[0], self.s
        match s.at, char:
            case "opened", "[" if self.syntax.brackets:
                s.at = "name"
            case ("key", ")") | ("after", ")"):
                self._call_ended()
            case "after", ",":
                s.at = "key"
            case "between", "," | ";":
                s.at = "name"
            case "between" | "name", "]" if self.syntax.brackets and not s.raw:
                self._list_ended()
            case "opened" | "name" | "key", _ if NAME.match(char):
                s.at = "name" if s.at == "opened" else s.at
                return self._in_word(text)
            case "between", _ if NAME.match(char) and not self.syntax.brackets:
                s.at = "name"
                return self._in_word(text)
            case _:
                return self._unexpected(text)
        self._keep(char)
        return text[1:]

    def _in_word(self, text: str) -> str:
        """A name, and the character behind it that says what it names."""
        s = self.s
        if not s.word.endswith(" "):
            end = past(NAME_CHARS, text)
            s.word += text[:end]
            text = text[end:]
        rest = text.lstrip(" ")
        s.word += text[: len(text) - len(rest)]
        if len(s.word) > MAX_NAME_CHARS:
            return self._no_word(rest)
        if not rest:
            return ""
        name = s.word.strip()
        if rest[0] != ("(" if s.at == "name" else "=") or self._is_prose(name):
            return self._no_word(rest)
        self._named(name)
        return rest[1:]

    def _is_prose(self, name: str) -> bool:
        """Whether a list without a marker begins with `name(`, and no such tool exists."""
        s = self.s
        return s.bare and s.at == "name" and bool(s.raw) and not self.teller.declares(name)

    def _no_word(self, rest: str) -> str:
        word, self.s.word = self.s.word, ""
        self._keep(word)
        return self._unexpected(rest if self.s.raw else word + rest)

    def _named(self, name: str) -> None:
        s = self.s
        word, s.word = s.word, ""
        if s.at == "name":
            s.count, s.at, s.call = 0, "key", name
            if s.bare and s.raw:
                self._keep(word + "(")
            else:
                self._begin_call()
            return
        self._begin_call()
        self.teller.fragment(("{" if s.count == 0 else ", ") + json.dumps(name) + ": ")
        s.count += 1
        s.at, s.literal = "value", PythonScan()

    def _in_value(self, text: str, *, final: bool = False) -> str:
        s = self.s
        position, status = s.literal.scan(text, final=final)
        self.teller.fragment(s.literal.writer.take())
        if status == "end":
            s.at = "after"
        elif status == "broken":
            held, s.literal.held = s.literal.held, ""
            return self._unexpected(held + text[position:])
        return text[position:]

    def _begin_call(self) -> None:
        """Report the call at hand, unless that is done."""
        s = self.s
        if s.call:
            self.teller.begin(s.call)
            s.call, s.raw = "", []

    def _call_ended(self) -> None:
        self._begin_call()
        if self.s.count:
            self.teller.fragment("}")
        self.teller.end()
        self.s.at = "between"

    def _list_ended(self) -> None:
        self.s.at = "end"
        self.s.done = self.s.bare

    def _unexpected(self, text: str) -> str:
        """Here is no call, or no more of one."""
        s = self.s
        if s.raw:
            self._give_back("a list of tool calls that is none")
            s.done = True
            return text
        if not self.teller.is_open:
            self.teller.warn(PARSE_FAILED, "text between tool calls")
        s.at = "broken"
        return text

    def _tell_broken(self, text: str) -> None:
        if self.teller.is_open:
            self.teller.fragment(text)
        else:
            self.teller.content(text)

    # ---- markers

    def on_marker(self, marker: str) -> None:
        s, x = self.s, self.syntax
        if s.at == "value":
            if s.literal.in_string:
                self._in_value(marker)
                return
            self._in_value("", final=True)
        if self.teller.is_open:
            self._cut_short()
        elif s.raw:
            s.raw += [s.word, marker] if marker in x.close else [s.word]
            self._give_back("a marker of tool calls with no call behind it")
        if marker in x.close:
            s.done = True
        else:
            s.at, s.word, s.raw = "opened", "", [marker]

    def _cut_short(self) -> None:
        """The stretch has ended inside a call: a missing parenthesis is forgiven."""
        if self.s.at in ("after", "key") and not self.s.word:
            self._call_ended()
        else:
            self.teller.end()

    def on_stray(self, marker: str) -> None:
        if self.s.at == "value" and self.s.literal.in_string:
            self._in_value(marker)

    # ---- the end

    def on_end(self, complete: bool) -> None:
        s = self.s
        if not complete:
            self.teller.drop()
        elif self.teller.is_open:
            self.teller.warn(PARSE_FAILED, "the last tool call is not finished")
            self.teller.drop()
        elif s.raw:
            s.raw.append(s.word)
            self._give_back("a list of tool calls that is not finished")
        elif s.word:
            self.teller.content(s.word)


FORMATS = {
    "pythonic": Pythonic(bare=True),
    "llama4_pythonic": Pythonic(open=("<|python_start|>",), close=("<|python_end|>",), bare=True),
    "lfm2": Pythonic(open=("<|tool_call_start|>",), close=("<|tool_call_end|>",)),
    "olmo3": Pythonic(open=("<function_calls>",), close=("</function_calls>",), brackets=False),
}
