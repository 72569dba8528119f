"""Calls as Gemma writes them: a name and an object whose keys have no quotes.

    <|tool_call>call:f{city:<|"|>Oslo<|"|>,days:3,at:{x:[1,true]}}<tool_call|>

The states are:

    opened   after the opening marker: `call:` and the name follow, up to the bracket
    value    in the object, outside its strings
    string   in a string between two markers
    quoted   in a JSON string between two quotes
    single   in a string between two single quotes
    closing  after a single quote that may end such a string
    after    after the object, before the closing marker
    broken   in text that is not such an object, which is emitted unchanged up to the closing marker

A string has no escapes and lasts up to the next string marker. A string between ordinary quotes has
JSON's escapes. Between single quotes, only quotes, backslashes and the usual blanks have escapes. A
single quote ends the string only if the key or value can end there; otherwise it is an apostrophe.
A bare word is a number, true, false or null, or else a string. If the schema of an argument does
not allow a string, a string is read as a type that the schema allows, because some checkpoints
write all values as strings.

Some checkpoints leave out `call`, write a parenthesis instead of the bracket, or an equals sign
instead of a colon.

Sources: the chat templates of Gemma 4 and FunctionGemma.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gateway.formats.argument_types import kinds_of, schema_of, typed_json
from gateway.formats.call_parser import CallParser, CallParserState, CallSyntax
from gateway.formats.event_builder import BLANKS, DeclaredTool
from gateway.formats.grammar_builder import GrammarBuilder, NotWritable, sequence
from gateway.formats.json_call import JsonExtent, text_of
from gateway.formats.json_scanner import LiteralScan
from gateway.formats.literal_dialect import Dialect
from gateway.formats.parser import Moves
from gateway.formats.schema_cases import Schemas
from gateway.formats.value_syntax import BARE_KEY, MarkedStrings, Notation, Values, arguments_form
from gateway.text.markers import match_end
from protocol.engine.grammar import Form, LiteralForm, Pattern

NO_CALL = "the marker of a tool call without a call after it"
MAX_NAME_CHARS = 256
MAX_BLANKS = 256
"""Most blanks between a single quote that ends a string and the text that shows this."""
IN_SINGLE = re.compile(r"[^'\\]*+")
SINGLE_ESCAPES = {"'": "'", '"': '"', "\\": "\\", "n": "\n", "t": "\t", "r": "\r"}
NAME = re.compile(r"(?:call)?\s*:?\s*([^\W\d][\w.\-]*)\s*")
HEAD_CHARS = re.compile(r"[\w.\-:\s]*+")

GEMMA = Dialect(
    quotes="\"'",
    outside_strings=True,
    word=re.compile(r"[^,:{}\[\]]*+"),
    key=re.compile(r"[^,:={}\[\]]*+"),
    colons=":=",
)
ROUND = msgspec.structs.replace(
    GEMMA,
    closes={"}": "{(", "]": "[", ")": "("},
    word=re.compile(r"[^,:{}\[\]()]*+"),
    key=re.compile(r"[^,:={}\[\]()]*+"),
)
"""GEMMA for calls whose arguments are in parentheses instead of braces."""


class GemmaState(CallParserState):
    """State of a `GemmaParser`."""

    at: str = "opened"
    #: The text before the bracket, so far.
    head: str = ""
    #: Name of the open call.
    name: str = ""
    #: Position in the arguments. Their strings are read by this parser, not by the scan.
    value: LiteralScan = msgspec.field(default_factory=LiteralScan)
    #: Whether the object is in parentheses.
    round: bool = False
    #: If not empty, the current string must be converted to one of these types, and is held back in
    #: `parts` until it ends.
    kinds: list[str] = []
    parts: list[str] = []
    #: Position in a string between ordinary quotes.
    quoted: JsonExtent = msgspec.field(default_factory=JsonExtent)
    #: In a string between single quotes: a backslash that may start an escape, or a quote that may
    #: end the string, and the blanks after it.
    pending: str = ""


class GemmaParser(CallParser):
    State = GemmaState
    syntax: Gemma

    def moves(self) -> Moves:
        x = self.syntax
        ends = ((x.close, x.open), self._end_or_open)
        tokens = tuple(end for end in ends[0] if self.context.lexicon.is_token(end))
        return {
            "opened": (ends,),
            "value": (((x.quote,), self._open_string), ends),
            "string": (((x.quote,), self._close_string),),
            "quoted": ((tokens, self._end_or_open),),
            "single": ((tokens, self._end_or_open),),
            "closing": (ends,),
            "after": (ends,),
            "broken": (ends,),
        }

    # ---- text

    def _in_head(self, text: str) -> str:
        s = self.s
        end = match_end(HEAD_CHARS, text)
        s.head += text[:end]
        rest = text[end:]
        named = NAME.fullmatch(s.head)
        if rest and rest[0] in "{(" and named:
            s.name, s.raw, s.at, s.round = named[1], [], "value", rest[0] == "("
            s.value.open(rest[0])
            s.value.drain()  # emitted with the first key; the builder writes `{}` for no arguments
            self.builder.start_call(s.name)
            return rest[1:]
        if rest or len(s.head) > MAX_NAME_CHARS:
            s.raw.append(s.head)
            self.reject(NO_CALL)
            s.done = True
        return rest

    def _in_value(self, text: str) -> str:
        s = self.s
        position, status = s.value.scan(text, ROUND if s.round else GEMMA)
        self._emit(last=status == "end")
        match status:
            case "end":
                s.at = "after"
            case "quote":
                self._start_string("single" if text[position - 1] == "'" else "quoted")
            case "broken":
                s.at = "broken"
                return str(s.value.drain_word()) + text[position:]
        return text[position:]

    def _emit(self, *, last: bool = False) -> None:
        text, has_arguments = self.s.value.drain(), self.builder.has_arguments
        if text and not (last and not has_arguments and text == "}"):
            self.builder.arguments_delta(text if has_arguments else "{" + text)

    def _after(self, text: str) -> str:
        rest = text.lstrip(BLANKS)
        if rest:
            self.builder.end_call()
            self.s.done = True
        return rest

    # ---- strings

    def _start_string(self, at: str) -> None:
        s = self.s
        s.parts, s.kinds, s.at, s.pending = [], [], at, ""
        s.quoted = JsonExtent(kind="string", quoted=True)
        if not s.value.is_key:
            s.kinds = self._kinds() if len(s.value.stack) == 1 else []
            if not s.kinds:
                s.value.start_text()
                self._emit()

    def _kinds(self) -> list[str]:
        """Return the JSON types that the current argument allows, if a string is not one of them. A
        string that the model writes there is converted to one of these types.

        The list is empty if the schema allows strings, or does not limit the type.
        """
        parameters = self.builder.parameters(self.s.name)
        kinds = kinds_of(schema_of(parameters, self.s.value.key), parameters)
        return [] if "string" in kinds else list(kinds)

    def _in_string(self, text: str) -> None:
        s = self.s
        if s.kinds or s.value.is_key:
            s.parts.append(text)
        else:
            s.value.text(text)
            self._emit()

    def _in_single_quotes(self, text: str) -> str:
        s = self.s
        if s.pending:
            meant = SINGLE_ESCAPES.get(text[0])
            s.pending = ""
            self._in_string("\\" + text[0] if meant is None else meant)
            return text[1:]
        end = match_end(IN_SINGLE, text)
        if end:
            self._in_string(text[:end])
        if end < len(text):
            s.pending = text[end]
            s.at = "closing" if text[end] == "'" else s.at
        return text[end + 1 :]

    def _after_single_quote(self, text: str) -> str:
        s = self.s
        room = MAX_BLANKS + 1 - len(s.pending)
        end = min(len(text) - len(text.lstrip(BLANKS)), room)
        s.pending += text[:end]
        rest = text[end:]
        if not rest:
            return ""
        ends = ":=" if s.value.is_key else ",}])"
        pending, s.pending = s.pending, ""
        if rest[0] in ends:
            self._end_string()
        else:
            s.at = "single"
            self._in_string(pending)
        return rest

    def _in_quotes(self, text: str) -> str:
        s = self.s
        position, status = s.quoted.scan(text)
        body = text[: position - 1] if status == "end" else text
        if s.kinds or s.value.is_key:
            s.parts.append(body)
        else:
            s.value.out.append(body)
        if status == "end":
            self._end_string()
        self._emit()
        return text[position:]

    def _end_string(self) -> None:
        s = self.s
        text, s.parts = "".join(s.parts), []
        if s.at == "quoted":
            meant = text_of(f'"{text}"')
            text = text if meant is None else meant
        s.at = "value"
        if s.value.is_key:
            s.value.complete_key(text)
        elif s.kinds:
            s.value.complete(typed_json(text, tuple(s.kinds)))
        else:
            s.value.complete('"')
        self._emit()

    TEXT = {
        "opened": _in_head,
        "value": _in_value,
        "string": _in_string,
        "quoted": _in_quotes,
        "single": _in_single_quotes,
        "closing": _after_single_quote,
        "after": _after,
        "broken": CallParser.broken_text,
    }

    # ---- markers

    def _open_string(self, marker: str) -> None:
        if self.s.value.open_quoted():
            self._start_string("string")
        else:
            self.s.at = "broken"
            self.broken_text(self.s.value.drain_word() + marker)

    def _close_string(self, marker: str) -> None:
        self._end_string()

    def _end_or_open(self, marker: str) -> None:
        s, x = self.s, self.syntax
        if s.at == "closing":
            self._end_string()
        if self.builder.is_open:
            if s.at in ("value", "quoted", "single"):
                self.broken_text(s.value.drain_word() + "".join(s.parts))
            self.builder.end_call()
        elif s.raw:
            s.raw += [s.head, marker] if marker == x.close else [s.head]
            self.reject(NO_CALL)
        if marker == x.close:
            s.done = True
        else:
            self.open(marker)

    def on_stray(self, marker: str) -> None:
        text = marker
        while text and self.s.at in ("string", "quoted", "single", "closing"):
            text = self.on_text(text)

    # ---- the end

    def on_end(self, complete: bool) -> None:
        if complete and self.s.at == "after" and self.builder.is_open:
            self.builder.end_call()
        super().on_end(complete)

    def unread(self) -> list[str]:
        return [self.s.head]


COMMA = LiteralForm(",")


class Gemma(CallSyntax, frozen=True, kw_only=True):
    """The markers of one Gemma family: `open` and `close` around a call, `quote` around a
    string."""

    PARSER = GemmaParser

    open: str
    close: str
    quote: str

    def markers(self) -> tuple[str, ...]:
        return (self.open, self.close, self.quote)

    def openers(self) -> tuple[str, ...]:
        return (self.open,)

    def notation(self) -> Notation:
        """Return the notation of values in the grammar: keys without quotes, strings in markers."""
        return Notation(
            name="gemma",
            strings=MarkedStrings(self.quote),
            bare=True,
            object=(LiteralForm("{"), LiteralForm("}")),
            array=(LiteralForm("["), LiteralForm("]")),
            colon=LiteralForm(":"),
            comma=COMMA,
        )

    def write_calls(self, opener: str, grammar: GrammarBuilder) -> Form:
        def write(tool: DeclaredTool) -> Form:
            named = NAME.fullmatch("call:" + tool.name)
            if named is None or named[1] != tool.name or len(tool.name) > MAX_NAME_CHARS // 2:
                raise NotWritable(tool.name, "name", "this format cannot write it")
            return sequence(tool.name, self.write_arguments(tool, grammar))

        return sequence("call:", grammar.each_tool(write), self.close)

    def write_arguments(self, tool: DeclaredTool, grammar: GrammarBuilder) -> Form:
        """Return the grammar of a call's arguments, with their brackets."""
        values = Values(self.notation(), Schemas(tool), grammar)

        def write(key: str | None, schema: Any, path: str) -> Form | None:
            name = Pattern(BARE_KEY) if key is None else values.key(key)
            return None if name is None else sequence(name, ":", values.value(schema, path))

        return sequence("{", arguments_form(values, write, COMMA), "}")


FORMATS = {
    "gemma4": Gemma(open="<|tool_call>", close="<tool_call|>", quote='<|"|>'),
    "functiongemma": Gemma(
        open="<start_function_call>", close="<end_function_call>", quote="<escape>"
    ),
}
