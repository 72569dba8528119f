"""Calls as Python writes them: `[f(a=1, b="x"), g()]`.

The states are:

    opened   before the list: its bracket follows, or the first name
    name     in a function's name, up to its parenthesis
    key      in a call: an argument's name follows, up to `=`, or the closing parenthesis
    value    in a literal, which is rewritten as JSON while it is read (`json_scanner`)
    quote    after a quote that may end a string whose inner quotes are not escaped
    after    after a value: a comma follows, or the closing parenthesis
    between  after a call: a comma, a line break or another name follows, or the list ends
    end      after the list: the closing marker follows
    broken   in text that is not a call, which is emitted unchanged up to the closing marker

At the very start of an answer, a `[` without a marker opens a list of calls only if three things
follow: the name of a tool of the request, a parenthesis, and an argument's name with `=` or the
closing parenthesis. Otherwise it is content, such as `[f(x) for x in y]`. In other places,
arguments without a name are emitted as the model wrote them, and are not valid JSON.

LFM2's templates do not escape the quotes in a string (`cmd='sed -n '1,5p' f'`). There, a quote ends
an argument only if `, name=` follows, or a parenthesis and then `]` or another call. Otherwise it
is part of the string. Inside lists and dictionaries, the first quote ends a string.

Sources: the model cards of Llama 3.2 and 4, LFM2 and OLMo 3; the chat template of MiniCPM3.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from gateway.formats.call_parser import NO_CALL, CallParser, CallParserState, CallSyntax
from gateway.formats.event_builder import BLANKS, DeclaredTool
from gateway.formats.grammar_builder import GrammarBuilder, NotWritable, sequence
from gateway.formats.json_scanner import ESCAPE, IN_QUOTES, QUOTES, STRING, LiteralScan
from gateway.formats.literal_dialect import PYTHON
from gateway.formats.parser import Moves
from gateway.formats.schema_cases import Schemas
from gateway.formats.string_limits import CONTROLS, StringEscapes
from gateway.formats.value_syntax import (
    HEX,
    NUMBERED,
    Notation,
    QuotedStrings,
    Values,
    arguments_form,
    json_notation,
)
from gateway.text.markers import match_end
from protocol.engine.grammar import Form, Pattern

MAX_NAME_CHARS = 256
NAME_CHARS = re.compile(r"[\w.\-]*+")
NAME = re.compile(r"[^\W\d][\w.\-]*+")
UP_TO_QUOTE = re.compile(r"[^'\"]*+['\"]?")
SPACES, WORD = r"[ \t\r\n]{0,64}+", r"[\w.\-]"
ENDS_STRING = re.compile(
    rf"{SPACES}(?:,{SPACES}\w{{1,256}}+ {{0,64}}+="
    rf"|\){SPACES}(?:\]|[,;]{SPACES}{WORD}{{1,256}}+ {{0,64}}+\())"
)
MAY_END_STRING = re.compile(
    rf"{SPACES}(?:,{SPACES}\w{{0,256}}+ {{0,64}}+"
    rf"|\){SPACES}(?:[,;]{SPACES}{WORD}{{0,256}}+ {{0,64}}+)?)?"
)
"""Text after a quote that ends an argument, and text that may become such a text. Both are bounded,
because the text is held back."""


class PythonicState(CallParserState):
    """State of a `PythonicParser`.

    word     the current name so far
    count    number of arguments of the open call so far
    literal  position in the current value
    bare     whether the list has started with its bracket, so that no marker will end it
    call     name of the first call in a bare list, until an argument shows that it is a call
    after    text after the quote in the state "quote", with the quote
    """

    at: str = "opened"
    word: str = ""
    count: int = 0
    literal: LiteralScan = msgspec.field(default_factory=LiteralScan)
    bare: bool = False
    call: str = ""
    after: str = ""


class PythonicParser(CallParser):
    State = PythonicState
    syntax: Pythonic

    def moves(self) -> Moves:
        x = self.syntax
        states = ("opened", "name", "key", "value", "quote", "after", "between", "end", "broken")
        ends, fence = (x.close + x.open, self._end_or_open), (x.fence, self.keep)
        fenced = ("opened", "between", "end")
        return dict.fromkeys(states, (ends,)) | dict.fromkeys(fenced, (ends, fence))

    def on_open(self, marker: str) -> None:
        s = self.s
        s.raw = [marker]
        if marker == "[" and marker not in self.syntax.open:
            s.bare, s.at = True, "name"

    # ---- text

    def on_text(self, text: str) -> str:
        s = self.s
        if s.at == "value":
            return self._in_argument(text) if self.syntax.inner_quotes else self._in_value(text)
        if s.at == "quote":
            return self._after_quote(text)
        if s.at == "broken":
            self.broken_text(text)
            return ""
        if s.word:
            return self._in_word(text)
        rest = text.lstrip(BLANKS)
        self.keep(text[: len(text) - len(rest)])
        return self._next(rest) if rest else ""

    def _next(self, text: str) -> str:
        """Read the first character of `text`, outside names and values. Return the unread text."""
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
                s.at, s.done = "end", s.bare
            case "opened" | "name" | "key", _ if NAME.match(char):
                s.at = "name" if s.at == "opened" else s.at
                return self._in_word(text)
            case "between", _ if NAME.match(char) and not self.syntax.brackets:
                s.at = "name"
                return self._in_word(text)
            case _:
                return self._unexpected(text)
        self.keep(char)
        return text[1:]

    def _in_word(self, text: str) -> str:
        """Read the name of a tool or an argument, and the `(` or `=` after it. Return the unread
        text.
        """
        s = self.s
        if not s.word.endswith(" "):
            end = match_end(NAME_CHARS, text)
            s.word += text[:end]
            text = text[end:]
        rest = text.lstrip(" ")
        s.word += text[: len(text) - len(rest)]
        if not rest and len(s.word) <= MAX_NAME_CHARS:
            return ""
        name, sign = s.word.strip(), "(" if s.at == "name" else "="
        if len(s.word) > MAX_NAME_CHARS or rest[0] != sign or self._is_prose(name):
            word, s.word = s.word, ""
            self.keep(word)
            return self._unexpected(rest if s.raw else word + rest)
        self._named(name)
        return rest[1:]

    def _is_prose(self, name: str) -> bool:
        """Return whether `name(` is prose and not a call: it follows a bracket without a marker,
        and `name` is not a declared tool."""
        s = self.s
        return s.bare and s.at == "name" and bool(s.raw) and not self.builder.declares(name)

    def _named(self, name: str) -> None:
        s = self.s
        word, s.word = s.word, ""
        if s.at == "name":
            s.count, s.at, s.call = 0, "key", name
            if s.bare and s.raw:
                self.keep(word + "(")
            else:
                self._start_call()
            return
        self._start_call()
        self.builder.arguments_delta(("{" if s.count == 0 else ", ") + json.dumps(name) + ": ")
        s.count += 1
        s.at, s.literal = "value", LiteralScan()

    def _in_argument(self, text: str) -> str:
        """Read a value up to a quote that may end it, if it is a string with one quote on each
        side. Return the unread text."""
        s, literal = self.s, self.s.literal
        if literal.stack or len(literal.quote) == 3:
            return self._in_value(text)
        if literal.at == STRING:
            end = match_end(IN_QUOTES[literal.quote], text)
            if text[end : end + 1] == literal.quote:
                s.at, s.after = "quote", literal.quote
            end += text[end : end + 1] == "\\"
        elif literal.at in (QUOTES, ESCAPE):
            end = 1
        else:
            end = match_end(UP_TO_QUOTE, text)
        skipped = s.at == "quote"
        unread = self._in_value(text[:end]) if end else ""
        return unread + text[end + skipped :]

    def _after_quote(self, text: str) -> str:
        """Read text after a quote, until it is known whether the quote ends the argument."""
        s = self.s
        s.after += text
        if ENDS_STRING.match(s.after, 1):
            return self._quote_ends()
        if MAY_END_STRING.fullmatch(s.after, 1):
            return ""
        after: str = s.after
        s.after, s.at = "", "value"
        s.literal.text(after[0])
        return after[1:]

    def _quote_ends(self) -> str:
        """End the string before the text that has been read after its quote. Return that text."""
        s = self.s
        after, s.after, s.at = s.after, "", "value"
        return self._in_value(after)

    def _in_value(self, text: str, *, final: bool = False) -> str:
        s = self.s
        position, status = s.literal.scan(text, PYTHON)
        if final:
            status = s.literal.scan_end()
        self.builder.arguments_delta(s.literal.drain())
        if status == "end":
            s.at = "after"
        elif status == "broken":
            return self._unexpected(s.literal.drain_word() + text[position:])
        return text[position:]

    def _start_call(self) -> None:
        """Emit the start of the current call, unless it has been emitted."""
        s = self.s
        if s.call:
            self.builder.start_call(s.call)
            s.call, s.raw = "", []

    def _call_ended(self) -> None:
        self._start_call()
        if self.s.count:
            self.builder.arguments_delta("}")
        self.builder.end_call()
        self.s.at = "between"

    def _unexpected(self, text: str) -> str:
        """Leave the list or call, because `text` does not continue it. Return `text`."""
        s = self.s
        if s.raw:
            self.reject("text that looks like a list of tool calls and is not one")
            s.done = True
            return text
        if not self.builder.is_open:
            self.builder.parse_failed("text between tool calls")
        s.at = "broken"
        return text

    # ---- markers

    def _end_or_open(self, marker: str) -> None:
        s, x = self.s, self.syntax
        if s.at == "quote":
            self._read_all(self._quote_ends())
        if s.at == "value":
            if s.literal.in_string:
                self._in_value(marker)
                return
            self._in_value("", final=True)
        if self.builder.is_open:
            self._cut_short()
        elif s.raw:
            s.raw += [s.word, marker] if marker in x.close else [s.word]
            self.reject(NO_CALL)
        if marker in x.close:
            s.done = True
        else:
            s.at, s.word, s.raw = "opened", "", [marker]

    def _cut_short(self) -> None:
        """End the open call, because its group has ended. A missing parenthesis is tolerated."""
        if self.s.at in ("after", "key") and not self.s.word:
            self._call_ended()
        else:
            self.builder.end_call()

    def _read_all(self, text: str) -> None:
        """Read text that no marker is searched in."""
        while text and not self.s.done:
            text = self.on_text(text)

    def on_stray(self, marker: str) -> None:
        if self.s.at == "quote":
            self._read_all(marker)
        elif self.s.at == "value" and self.s.literal.in_string:
            self._in_value(marker)

    # ---- the end

    def on_end(self, complete: bool) -> None:
        s = self.s
        if complete and s.at == "quote":
            self._read_all(self._quote_ends())
        if complete and s.raw and not self.builder.is_open:
            s.raw.append(s.word)
            self.reject("a list of tool calls that is not finished")
        elif complete and s.word and not self.builder.is_open:
            self.builder.content(s.word)
        super().on_end(complete)


# ---- the grammar

KEYWORD = re.compile(r"[^\W\d]\w*")
ANY_KEYWORD = Pattern("[A-Za-z_][A-Za-z0-9_]{0,63}")
COMMA = Pattern(", ?")
ESCAPED = rf"{NUMBERED}|\\x{HEX}{{2}}|\\U000[1-9a-fA-F]{HEX}{{4}}"


def _quotes(quote: str) -> QuotedStrings:
    escapes = {"\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", quote: "\\" + quote}
    return QuotedStrings(quote, StringEscapes(never=CONTROLS, escapes=escapes, numbered=ESCAPED))


PYTHON_NOTATION = Notation(
    name="python", strings=(_quotes('"'), _quotes("'")), words=("None", "True", "False")
)


class Pythonic(CallSyntax, frozen=True, kw_only=True):
    """One model family's spelling of calls as Python: its markers and options.

    open      markers that start a list of calls
    close     markers that end it
    bare      whether a `[` at the start of an answer starts a list, too
    brackets  whether the list is in brackets; otherwise there is one call per line
    fence     text before and after the calls, if there is one call per line
    inner_quotes  whether quotes in a string may lack a backslash
    json      whether the model writes values as JSON. Only the grammar uses it
    """

    PARSER = PythonicParser

    open: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    bare: bool = False
    brackets: bool = True
    fence: tuple[str, ...] = ()
    inner_quotes: bool = False
    json: bool = False

    def markers(self) -> tuple[str, ...]:
        return self.open + self.close

    def openers(self) -> tuple[str, ...]:
        return self.open

    def start_openers(self) -> tuple[str, ...]:
        return ("[",) if self.bare else ()

    def write_calls(self, opener: str, grammar: GrammarBuilder) -> Form:
        notation = json_notation(()) if self.json else PYTHON_NOTATION
        call = grammar.call_rule(lambda tool: _write_call(tool, grammar, notation))
        if not self.brackets:
            before, after = (f"\n{mark}\n" for mark in self.fence) if self.fence else ("\n", "\n")
            return sequence(before, grammar.several(call, "\n"), after + self.close[0])
        calls = grammar.several(call, COMMA)
        if opener in self.open:
            return sequence("[", calls, "]" + self.close[0])
        return sequence(calls, "]")


def _write_call(tool: DeclaredTool, grammar: GrammarBuilder, notation: Notation) -> Form:
    if not NAME.fullmatch(tool.name) or len(tool.name) >= MAX_NAME_CHARS:
        raise NotWritable(tool.name, "name", "this format cannot write it")
    values = Values(notation, Schemas(tool), grammar)

    def write(key: str | None, schema: Any, path: str) -> Form | None:
        if key is not None and not (KEYWORD.fullmatch(key) and len(key) < MAX_NAME_CHARS):
            return None
        return sequence(ANY_KEYWORD if key is None else key, "=", values.value(schema, path))

    return sequence(tool.name + "(", arguments_form(values, write, COMMA), ")")


FORMATS = {
    "pythonic": Pythonic(bare=True),
    "llama4_pythonic": Pythonic(open=("<|python_start|>",), close=("<|python_end|>",), bare=True),
    "lfm2": Pythonic(
        open=("<|tool_call_start|>",), close=("<|tool_call_end|>",), inner_quotes=True
    ),
    "minicpm3": Pythonic(
        open=("<|tool_call_start|>",),
        close=("<|tool_call_end|>",),
        brackets=False,
        fence=("```python", "```"),
        json=True,
    ),
    "olmo3": Pythonic(open=("<function_calls>",), close=("</function_calls>",), brackets=False),
}
