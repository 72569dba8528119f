"""Kimi K3's answers in XTML: XML-like elements whose tags are made of special tokens.

    <|open|>think<|sep|>Hm.<|close|>think<|sep|>
    <|open|>response<|sep|>I will look.<|close|>response<|sep|>
    <|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>
    <|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|>

(Without the line breaks.)

    text  in an element, or between elements
    tag   after `<|open|>` or `<|close|>`, up to `<|sep|>`

`INSIDE` lists the elements that may stand in each element; any other tag is text of the element it
stands in. So a string may contain every tag except its own closing one. An answer starts inside a
response if the prompt has not opened the thinking: the response's opening tag may be missing. In
attributes `&quot;` and `&amp;` are escaped; values have no escapes. An argument of type string is
emitted as it comes, verbatim; any other is JSON, or a string if it is not valid JSON.

Source: the published parser's description of the protocol.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.formats.argument_types import ArgumentsWriter
from gateway.formats.arguments_grammar import arguments_form
from gateway.formats.event_builder import BLANKS, PARSE_FAILED, DeclaredTool, EventBuilder
from gateway.formats.grammar_builder import GrammarBuilder, NotWritable
from gateway.formats.grammar_forms import (
    ANY_TEXT,
    AnswerFrame,
    either,
    optional,
    sequence,
    without_prefix,
)
from gateway.formats.parser import AnswerSyntax, FormatParser, FormatParserState, ParserContext
from gateway.formats.plain_values import PlainValues, ValueEnd
from gateway.formats.schema_cases import SchemaCase, Schemas, anything
from gateway.formats.value_syntax import Values, json_notation
from protocol.grammar import Form, LiteralForm, Pattern, Repeat, Until

MAX_TAG_CHARS = 512
ATTRIBUTE = re.compile(r'\s+(\w+)="([^"]*)"')
NAME = re.compile(r"\w+")

CHANNELS = ("think", "response", "tools")
INSIDE = {"": CHANNELS, "think": CHANNELS, "response": CHANNELS, "tools": ("call",),
          "call": ("argument",), "argument": ()}  # fmt: skip
"""Element -> elements that may open in it. A channel that opens in another one ends it."""


class Xtml(AnswerSyntax, frozen=True, kw_only=True):
    """Markers of this syntax: `open` and `close` start a tag, `separator` ends it."""

    open: str = "<|open|>"
    close: str = "<|close|>"
    separator: str = "<|sep|>"

    def markers(self) -> tuple[str, ...]:
        return (self.open, self.close, self.separator)

    def parser(
        self,
        context: ParserContext,
        builder: EventBuilder,
        state: Mapping[str, Any] | None = None,
        *,
        starts_inside: bool = False,
    ) -> FormatParser:
        return XtmlParser(self, context, builder, state, starts_inside=starts_inside)


class XtmlState(FormatParserState):
    """State of an `XtmlParser`.

    stack      names of the open elements
    tag        the current tag, its marker included
    arguments  arguments of the open call
    spilt      there was text among the calls
    """

    at: str = "text"
    stack: list[str] = []
    tag: str = ""
    arguments: ArgumentsWriter = msgspec.field(default_factory=ArgumentsWriter)
    spilt: bool = False


class XtmlParser(FormatParser):
    State = XtmlState

    def __init__(
        self,
        syntax: Xtml,
        context: ParserContext,
        builder: EventBuilder,
        state: Mapping[str, Any] | None = None,
        *,
        starts_inside: bool = False,
    ) -> None:
        self.syntax = syntax
        super().__init__(context, builder, state)
        if state is None:
            self._begin("think" if starts_inside else "response")

    def table(self) -> Mapping[str, tuple[str, ...]]:
        x = self.syntax
        return {"text": (x.open, x.close), "tag": (x.separator, x.open, x.close)}

    @property
    def _in(self) -> str:
        """Return the innermost open element; "" between channels."""
        return self.s.stack[-1] if self.s.stack else ""

    # ---- text

    def on_text(self, text: str) -> str:
        if self.s.at == "tag":
            return self._in_tag(text)
        match self._in:
            case "think":
                self.builder.reasoning(text)
            case "argument":
                self.s.arguments.text(text, self.builder)
            case "tools" | "call":
                self._spill(text)
            case "":
                if text.strip(BLANKS):
                    self._begin("response")
                    self.builder.content(text)
            case _:
                self.builder.content(text)
        return ""

    def _spill(self, text: str) -> None:
        """Emit text among the calls, outside their arguments, unless it is blank."""
        s = self.s
        if self._in == "call" or not (s.spilt or text.strip(BLANKS)):
            return
        if not s.spilt:
            s.spilt = True
            self.builder.warn(PARSE_FAILED, "text between tool calls")
        self.builder.content(text)

    def _in_tag(self, text: str) -> str:
        s = self.s
        s.tag += text
        if "\n" in text or len(s.tag) > MAX_TAG_CHARS:
            self._was_text()
        return ""

    def _was_text(self) -> None:
        """Add a failed tag to the text of its element."""
        tag, self.s.tag, self.s.at = self.s.tag, "", "text"
        self.on_text(tag)

    # ---- tags

    def on_marker(self, marker: str) -> None:
        s, x = self.s, self.syntax
        if marker == x.separator:
            s.at = "text"
            if not self._tag():
                s.tag += marker
                self._was_text()
            s.tag = ""
            return
        if s.at == "tag":
            self._was_text()
        s.at, s.tag = "tag", marker

    def on_stray(self, marker: str) -> None:
        if self._in in ("think", "argument"):
            self.on_text(marker)

    def _tag(self) -> bool:
        """Handle a complete tag. Return whether it has a meaning here."""
        tag, x = self.s.tag, self.syntax
        opens = tag.startswith(x.open)
        body = tag.removeprefix(x.open if opens else x.close).strip(BLANKS)
        found = NAME.match(body)
        if found is None:
            return False
        if opens:
            return self._open(found[0], attributes(body[found.end() :]))
        return self._close(found[0]) if found[0] == body else False

    def _open(self, name: str, given: Mapping[str, str]) -> bool:
        if name not in INSIDE[self._in] or (name == "call" and not given.get("tool")):
            return False
        if name in CHANNELS and self.s.stack:
            self._end(self._in)
        self._begin(name, given)
        return True

    def _begin(self, name: str, given: Mapping[str, str] | None = None) -> None:
        s, given = self.s, given or {}
        s.stack.append(name)
        match name:
            case "think":
                self.builder.start_reasoning()
            case "call":
                s.arguments = ArgumentsWriter()
                self.builder.start_call(given["tool"])
            case "argument":
                kinds = ("string",) if given.get("type", "string") == "string" else ()
                s.arguments.begin(given.get("key", ""), kinds, self.builder, bare_json=not kinds)

    def _close(self, name: str) -> bool:
        if name == "message" and self._in != "argument":
            return True
        if name == "tools" and self._in == "call":
            self._end("call")
        if name != self._in:
            return False
        self._end(name)
        return True

    def _end(self, name: str) -> None:
        s = self.s
        s.stack.pop()
        match name:
            case "think":
                self.builder.end_reasoning()
            case "argument":
                s.arguments.end(self.builder, bare_json=True)
            case "call":
                s.arguments.close(self.builder)
                self.builder.end_call()

    # ---- the end

    def on_end(self, complete: bool) -> None:
        if complete and self.s.at == "tag":
            self._was_text()
        if complete and self.builder.is_open:
            self.builder.warn(PARSE_FAILED, "the last tool call is not finished")
        self.builder.abandon_call()
        if self._in == "think":
            self.builder.end_reasoning()
        self.builder.finish()


def attributes(text: str) -> dict[str, str]:
    return {
        found[1]: found[2].replace("&quot;", '"').replace("&amp;", "&")
        for found in ATTRIBUTE.finditer(text)
    }


# ---- grammar writer

ANY_KEY = Pattern(r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}")
LATER_INDEX = Pattern("[1-9][0-9]{0,2}")
"""Index of a call after the first. The parser counts calls itself."""


def _write_tools_element(
    syntax: Xtml, tools: Sequence[DeclaredTool], many: bool, grammar: GrammarBuilder
) -> Form:
    """Write the element of all calls, with its tags."""
    x = syntax
    close = _close_tag(x, "call")
    bodies = [(_attribute(tool.name), _write_arguments(x, tool, grammar)) for tool in tools]

    def call(index: Form | str) -> Form:
        options = (
            sequence(f'tool="{name}" index="', index, f'"{x.separator}', body)
            for name, body in bodies
        )
        return sequence(f"{x.open}call ", either(options), close)

    more = Repeat(grammar.rule("call", call(LATER_INDEX))) if many else LiteralForm("")
    return sequence(_open_tag(x, "tools"), call("1"), more, _close_tag(x, "tools"))


def _open_tag(x: Xtml, name: str) -> str:
    return f"{x.open}{name}{x.separator}"


def _close_tag(x: Xtml, name: str) -> str:
    return f"{x.close}{name}{x.separator}"


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _write_arguments(x: Xtml, tool: DeclaredTool, grammar: GrammarBuilder) -> Form:
    """Write a call's arguments."""
    if len(tool.name) > MAX_TAG_CHARS // 2:
        raise NotWritable(tool.name, "name", "this format cannot write it")
    ending = ValueEnd(close=_close_tag(x, "argument"))
    values = Values(json_notation(ending.words), Schemas(tool), grammar)
    plain = PlainValues(values, ending)

    def write(key: str | None, schema: Any, path: str) -> Form | None:
        if key is not None and ("\n" in key or "<|" in key or len(key) > MAX_TAG_CHARS // 2):
            return None
        name = ANY_KEY if key is None else _attribute(key)
        tag = sequence(f'{x.open}argument key="', name, '" type="')
        return sequence(tag, _write_value(x, plain, values.schemas.cases(schema, path), path))

    return grammar.rule("arguments", arguments_form(values, write))


def _write_value(x: Xtml, plain: PlainValues, cases: Sequence[SchemaCase], path: str) -> Form:
    kinds: dict[str, list[SchemaCase]] = {}
    for case in cases:
        kinds.setdefault(TYPE_NAMES.get(case.kind, case.kind), []).append(case)
    ways = []
    for kind, found in kinds.items():
        if kind != "string":
            value = either(plain.values.case(case, path) for case in found)
            value = sequence(value, plain.ending.close)
        elif anything(cases):
            value = plain.text()
        else:
            value = plain.of(found, ("string",), path)
        ways.append(sequence(f'{kind}"{x.separator}', value))
    return either(ways)


TYPE_NAMES = {"integer": "number"}
"""JSON schema type -> the model's name for it, if that differs."""


# ---- grammar writer


def answer_frame(syntax: Xtml) -> AnswerFrame:
    return AnswerFrame(
        opens=_open_tag(syntax, "think"),
        closes=_close_tag(syntax, "think"),
        before=_open_tag(syntax, "response"),
        after=_close_tag(syntax, "response"),
    )


def write_required(
    syntax: Xtml, tools: Sequence[DeclaredTool], many: bool, grammar: GrammarBuilder
) -> Form:
    return sequence(
        _write_tools_element(syntax, tools, many, grammar),
        optional(LiteralForm(_close_tag(syntax, "message"))),
    )


def write_strict(
    syntax: Xtml, tools: Sequence[DeclaredTool], many: bool, grammar: GrammarBuilder
) -> Form:
    """Write a response, whose opening tag the prompt may have written, followed by calls."""
    opened, end = (
        optional(LiteralForm(_open_tag(syntax, "response"))),
        LiteralForm(_close_tag(syntax, "message")),
    )
    calls = grammar.rule("calls", write_required(syntax, tools, many, grammar))
    closed = sequence(Until(_close_tag(syntax, "response")), optional(either((calls, end))))
    opener = _open_tag(syntax, "tools")
    broken_off = sequence(
        Until(opener), without_prefix(opener, write_required(syntax, tools, many, grammar))
    )
    return either((calls, sequence(opened, either((closed, broken_off, ANY_TEXT)))))


FORMATS = {"kimi_k3": Xtml()}
