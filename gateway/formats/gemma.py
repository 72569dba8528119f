"""Calls as Gemma writes them: a name and an object whose keys have no quotes.

    <|tool_call>call:f{city:<|"|>Oslo<|"|>,days:3,at:{x:[1,true]}}<tool_call|>

    opened   after the opening marker: `call:` and the name, up to the bracket
    value    in the object, outside its strings
    string   in a string between two markers
    quoted   in a JSON string between two quotes
    after    after the object, up to the closing marker
    broken   not such an object; up to the closing marker it is emitted unchanged

A string has no escapes and lasts up to the next string marker. A string between ordinary quotes has
JSON's escapes. A bare word is a number, true, false or null, or else a string. If the tool's schema
does not allow a string, a string is read as a type that it allows: some checkpoints write all
values as strings.

Some checkpoints leave out `call`, or write a parenthesis for the bracket. Sources: the chat
templates of Gemma 4 and FunctionGemma.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.formats.argument_types import kinds_of, schema_of, typed_json
from gateway.formats.arguments_grammar import arguments_form
from gateway.formats.event_builder import BLANKS, PARSE_FAILED, DeclaredTool, EventBuilder
from gateway.formats.grammar_builder import GrammarBuilder, NotWritable
from gateway.formats.grammar_forms import either, sequence
from gateway.formats.json_scanner import SPACE, JsonScan, text_of
from gateway.formats.literal import LiteralWriter
from gateway.formats.parser import CallParser, CallSyntax, FormatParserState, ParserContext
from gateway.formats.schema_cases import Schemas
from gateway.formats.value_syntax import BARE_KEY, MarkedStrings, Notation, Values
from gateway.text.markers import match_end
from protocol.grammar import Form, LiteralForm, Pattern

MAX_NAME_CHARS = 256
NAME = re.compile(r"(?:call)?\s*:?\s*([^\W\d][\w.\-]*)\s*")
HEAD_CHARS = re.compile(r"[\w.\-:\s]*+")
WORD = re.compile(r"[^,:{}\[\]]*+")
WORD_IN_PARENTHESES = re.compile(r"[^,:{}\[\]()]*+")


class Gemma(CallSyntax, frozen=True, kw_only=True):
    """Markers of this syntax: `open` and `close` stand around a call, `quote` around a string."""

    open: str
    close: str
    quote: str

    def markers(self) -> tuple[str, ...]:
        return (self.open, self.close, self.quote)

    def openers(self) -> tuple[str, ...]:
        return (self.open,)

    def call_parser(
        self, context: ParserContext, builder: EventBuilder, state: Mapping[str, Any] | None = None
    ) -> CallParser:
        return GemmaParser(self, context, builder, state)


class GemmaState(FormatParserState):
    """State of a `GemmaParser`."""

    at: str = "opened"
    #: The text before the bracket, as far as it is read.
    head: str = ""
    #: Name of the open call.
    name: str = ""
    #: Structure of the object.
    writer: LiteralWriter = msgspec.field(default_factory=LiteralWriter)
    #: The part read so far of the current key or bare value.
    word: list[str] = []
    #: The object stands in parentheses.
    round: bool = False
    #: The last key of the object itself, not of one inside it.
    key: str = ""
    #: The current string must have one of these types, and waits in `parts`.
    kinds: list[str] = []
    parts: list[str] = []
    #: Position in a string between ordinary quotes.
    quoted: JsonScan = msgspec.field(default_factory=JsonScan)
    #: Text until a call is emitted: it may have to become content.
    raw: list[str] = []


class GemmaParser(CallParser):
    syntax: Gemma

    State = GemmaState

    def table(self) -> Mapping[str, tuple[str, ...]]:
        x = self.syntax
        ends = (x.close, x.open)
        return {
            "opened": ends,
            "value": (x.quote, *ends),
            "string": (x.quote,),
            "quoted": tuple(end for end in ends if self.context.lexicon.is_token(end)),
            "after": ends,
            "broken": ends,
        }

    def on_open(self, marker: str) -> None:
        self.s.raw = [marker]

    # ---- text

    def on_text(self, text: str) -> str:
        s = self.s
        match s.at:
            case "opened":
                return self._in_head(text)
            case "value":
                return self._in_value(text)
            case "string":
                self._in_string(text)
            case "quoted":
                return self._in_quotes(text)
            case "after":
                return self._behind(text)
            case "broken":
                self._tell_broken(text)
        return ""

    def _in_head(self, text: str) -> str:
        s = self.s
        end = match_end(HEAD_CHARS, text)
        s.head += text[:end]
        rest = text[end:]
        named = NAME.fullmatch(s.head)
        if rest and rest[0] in "{(" and named:
            s.name, s.raw, s.at, s.round = named[1], [], "value", rest[0] == "("
            s.writer.open("{")
            s.writer.take()  # emitted with the first key; the builder writes `{}` for no arguments
            self.builder.start_call(s.name)
            return rest[1:]
        if rest or len(s.head) > MAX_NAME_CHARS:
            s.raw.append(s.head)
            self._reject("a marker of a tool call with no call behind it")
            s.done = True
        return rest

    def _in_value(self, text: str) -> str:
        s = self.s
        position, word = 0, WORD_IN_PARENTHESES if s.round else WORD
        while position < len(text):
            if not s.word:
                position = match_end(SPACE, text, position)
                if text[position : position + 1] == '"' and s.writer.want in ("key", "value"):
                    self._tell()
                    self._begin_string("quoted")
                    return text[position + 1 :]
            end = match_end(word, text, position)
            s.word += [text[position:end]] if end > position else []
            if end == len(text):
                break
            position = end + 1
            if not self._structural(text[end]):
                self._tell()
                s.at = "broken"
                return text[end:]
            if s.writer.done:
                s.at = "after"
                return text[position:]
        self._tell()
        return ""

    def _structural(self, char: str) -> bool:
        if char == ")" and self.s.round and len(self.s.writer.stack) == 1:
            char = "}"
        return self._word_ended() and self._bracket(char)

    def _bracket(self, char: str) -> bool:
        writer: LiteralWriter = self.s.writer
        if char in "{[":
            return writer.open(char)
        if char in "}]":
            ok = writer.close(char)
            self._tell(last=writer.done)
            return ok
        return writer.separator(char)

    def _word_ended(self) -> bool:
        """Complete the current key or bare value, if there is one."""
        s = self.s
        word, s.word = "".join(s.word).strip(BLANKS), []
        if not word:
            return True
        self._note_key(word)
        writer: LiteralWriter = s.writer
        return writer.scalar(word)

    def _note_key(self, word: str) -> None:
        if len(self.s.writer.stack) == 1 and self.s.writer.want == "key":
            self.s.key = word

    def _tell(self, *, last: bool = False) -> None:
        text = self.s.writer.take()
        if not text or (last and not self._told_any and text == "}"):
            return
        self.builder.arguments_delta(text if self._told_any else "{" + text)

    @property
    def _told_any(self) -> bool:
        return self.builder.has_arguments

    def _in_string(self, text: str) -> None:
        s = self.s
        if s.kinds or s.writer.want == "key":
            s.parts.append(text)
        else:
            s.writer.string(text)
            self._tell()

    def _behind(self, text: str) -> str:
        rest = text.lstrip(BLANKS)
        if rest:
            self._end_call()
            self.s.done = True
        return rest

    def _tell_broken(self, text: str) -> None:
        if self.builder.is_open:
            self.builder.arguments_delta(text)
        else:
            self.builder.content(text)

    # ---- strings

    def _begin_marked(self) -> None:
        s = self.s
        if s.word or s.writer.want not in ("key", "value"):
            s.at = "broken"
            self._tell_broken("".join(s.word) + self.syntax.quote)
            return
        self._begin_string("string")

    def _begin_string(self, at: str) -> None:
        s = self.s
        s.parts, s.kinds, s.at = [], [], at
        s.quoted = JsonScan(kind="string", quoted=True)
        if s.writer.want == "value":
            if len(s.writer.stack) == 1:
                s.kinds = self._kinds()
            if not s.kinds:
                s.writer.begin_string()
                self._tell()

    def _kinds(self) -> list[str]:
        """Return the types of the current argument if a string is not one of them."""
        parameters = self.builder.parameters(self.s.name)
        kinds = kinds_of(schema_of(parameters, self.s.key), parameters)
        return [] if "string" in kinds else list(kinds)

    def _in_quotes(self, text: str) -> str:
        s = self.s
        position, status = s.quoted.scan(text)
        body = text[: position - 1] if status == "end" else text
        if s.kinds or s.writer.want == "key":
            s.parts.append(body)
        else:
            s.writer.json_string(body)
        if status == "end":
            self._end_string()
        self._tell()
        return text[position:]

    def _end_string(self) -> None:
        s = self.s
        text, s.parts = "".join(s.parts), []
        if s.at == "quoted":
            meant = text_of(f'"{text}"')
            text = text if meant is None else meant
        s.at = "value"
        if s.writer.want == "key":
            self._note_key(text)
            s.writer.scalar(text)
        elif s.kinds:
            s.writer.raw(typed_json(text, tuple(s.kinds)))
        else:
            s.writer.end_string()
        self._tell()

    # ---- markers

    def on_marker(self, marker: str) -> None:
        s, x = self.s, self.syntax
        if s.at == "string":
            self._end_string()
        elif marker == x.quote:
            self._begin_marked()
        else:
            self._end_or_open(marker)

    def _end_or_open(self, marker: str) -> None:
        s, x = self.s, self.syntax
        if self.builder.is_open:
            if s.at in ("value", "quoted"):
                self._tell_broken("".join(s.word + s.parts))
            self._end_call()
        elif s.raw:
            s.raw += [s.head, marker] if marker == x.close else [s.head]
            self._reject("a marker of a tool call with no call behind it")
        if marker == x.close:
            s.done = True
        else:
            self.open(marker)

    def _end_call(self) -> None:
        if self.builder.is_open:
            self.builder.end_call()

    def on_stray(self, marker: str) -> None:
        if self.s.at == "string":
            self._in_string(marker)
        elif self.s.at == "quoted":
            self._in_quotes(marker)

    # ---- the end

    def on_end(self, complete: bool) -> None:
        s = self.s
        if not complete:
            self.builder.abandon_call()
        elif s.at == "after":
            self._end_call()
        elif self.builder.is_open:
            self.builder.warn(PARSE_FAILED, "the last tool call is not finished")
            self.builder.abandon_call()
        elif s.raw:
            s.raw.append(s.head)
            self._reject("a tool call that is not finished")


# ---- grammar writer

COMMA = LiteralForm(",")


def notation(syntax: Gemma) -> Notation:
    return Notation(
        name="gemma",
        strings=MarkedStrings(syntax.quote),
        bare=True,
        object=(LiteralForm("{"), LiteralForm("}")),
        array=(LiteralForm("["), LiteralForm("]")),
        colon=LiteralForm(":"),
        comma=COMMA,
    )


def write_calls(
    syntax: Gemma, opener: str, tools: Sequence[DeclaredTool], many: bool, grammar: GrammarBuilder
) -> Form:
    calls = either(_write_call(syntax, tool, grammar) for tool in tools)
    return sequence("call:", calls, syntax.close)


def _write_call(syntax: Gemma, tool: DeclaredTool, grammar: GrammarBuilder) -> Form:
    named = NAME.fullmatch("call:" + tool.name)
    if named is None or named[1] != tool.name or len(tool.name) > MAX_NAME_CHARS // 2:
        raise NotWritable(tool.name, "name", "this format cannot write it")
    return sequence(tool.name, write_arguments(syntax, tool, grammar))


def write_arguments(syntax: Gemma, tool: DeclaredTool, grammar: GrammarBuilder) -> Form:
    """Write a call's arguments."""
    values = Values(notation(syntax), Schemas(tool), grammar)

    def write(key: str | None, schema: Any, path: str) -> Form | None:
        name = Pattern(BARE_KEY) if key is None else values.key(key)
        if name is None:
            return None
        return sequence(name, ":", values.value(schema, path))

    return sequence("{", arguments_form(values, write, COMMA), "}")


FORMATS = {
    "gemma4": Gemma(open="<|tool_call>", close="<tool_call|>", quote='<|"|>'),
    "functiongemma": Gemma(
        open="<start_function_call>", close="<end_function_call>", quote="<escape>"
    ),
}
