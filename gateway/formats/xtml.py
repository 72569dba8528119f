"""Kimi K3's answers in XTML: XML-like elements whose tags are made of special tokens.

Without the line breaks, an answer is:

    <|open|>think<|sep|>Hm.<|close|>think<|sep|>
    <|open|>response<|sep|>I will look.<|close|>response<|sep|>
    <|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>
    <|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|>

The states are:

    text  in an element, or between elements
    tag   after `<|open|>` or `<|close|>`, up to `<|sep|>`

`INSIDE` lists the elements that may open in each element. Any other tag is text of the element that
contains it. So a string may contain every tag except its own closing one. If the prompt has not
opened the thinking, an answer starts inside a response, so the response's opening tag may be
missing. In attributes `&quot;` and `&amp;` are escapes; values have no escapes. An argument of type
string is emitted unchanged as it arrives. Any other argument is JSON, or a string if it is not
valid JSON.

Source: the published parser's description of the protocol.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.formats.answer_parser import AnswerParser, AnswerSyntax
from gateway.formats.argument_types import ArgumentsWriter
from gateway.formats.event_builder import BLANKS, DeclaredTool
from gateway.formats.grammar_builder import (
    ANY_KEY,
    ANY_TEXT,
    AnswerFrame,
    GrammarBuilder,
    NotWritable,
    either,
    optional,
    sequence,
    without_prefix,
)
from gateway.formats.parser import FormatParserState, Moves
from gateway.formats.plain_values import PlainValues, ValueEnd
from gateway.formats.schema_cases import SchemaCase, Schemas, anything
from gateway.formats.value_syntax import Values, arguments_form, json_notation
from protocol.engine.grammar import Form, LiteralForm, Pattern, Until

MAX_TAG_CHARS = 512
ATTRIBUTE = re.compile(r'\s+(\w+)="([^"]*)"')
NAME = re.compile(r"\w+")
OF_CALLS = re.compile(r">\s*(?:tools|call|argument)\b")
"""A tag that has a meaning in calls only."""

CHANNELS = ("think", "response", "tools")
INSIDE = {"": CHANNELS, "think": CHANNELS, "response": CHANNELS, "tools": ("call",),
          "call": ("argument",), "argument": ()}  # fmt: skip
"""Element -> elements that may open in it. A channel ends the channel in which it opens."""


class XtmlState(FormatParserState):
    """State of an `XtmlParser`.

    stack      names of the open elements
    tag        text of the current tag so far, including its marker
    arguments  writer of the open call's arguments
    spilt      whether there has been text between the calls
    """

    at: str = "text"
    stack: list[str] = []
    tag: str = ""
    arguments: ArgumentsWriter = msgspec.field(default_factory=ArgumentsWriter)
    spilt: bool = False


class XtmlParser(AnswerParser):
    State = XtmlState

    def start(self, starts_inside: bool) -> None:
        self._begin("think" if starts_inside else "response")

    def moves(self) -> Moves:
        x = self.syntax
        starts = ((x.open, x.close), self._start_tag)
        return {"text": (starts,), "tag": (((x.separator,), self._end_tag), starts)}

    @property
    def _in(self) -> str:
        """Name of the innermost open element; "" if none is open."""
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
                if text := text.lstrip(BLANKS):
                    self._begin("response")
                    self.builder.content(text)
            case _:
                self.builder.content(text)
        return ""

    def _spill(self, text: str) -> None:
        """Emit text between calls, unless it is blank. Drop text between arguments."""
        s = self.s
        if not s.spilt:
            text = text.lstrip(BLANKS)
        if self._in == "call" or not text:
            return
        if not s.spilt:
            s.spilt = True
            self.builder.parse_failed("text between tool calls")
        self.builder.content(text)

    def _in_tag(self, text: str) -> str:
        s = self.s
        s.tag += text
        if "\n" in text or len(s.tag) > MAX_TAG_CHARS:
            self._was_text()
        return ""

    def _was_text(self) -> None:
        """Handle an unknown tag as text of the element that contains it."""
        tag, self.s.tag, self.s.at = self.s.tag, "", "text"
        if self._in in ("", "response") and (found := OF_CALLS.search(tag)):
            self.builder.found_markup(tag[: found.end()])
        self.on_text(tag)

    # ---- tags

    def _start_tag(self, marker: str) -> None:
        if self.s.at == "tag":
            self._was_text()
        self.s.at, self.s.tag = "tag", marker

    def _end_tag(self, marker: str) -> None:
        s = self.s
        s.at = "text"
        if not self._tag():
            s.tag += marker
            self._was_text()
        s.tag = ""

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
            case "tools":
                self.builder.found_markup(name)
            case "call":
                s.arguments = ArgumentsWriter()
                self.builder.start_call(given["tool"])
            case "argument":
                kinds = ("string",) if given.get("type", "string") == "string" else ()
                s.arguments.start(given.get("key", ""), kinds, self.builder, bare_json=not kinds)

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
            self.builder.parse_failed("the last tool call is not finished")
        self.builder.abandon_call()
        if self._in == "think":
            self.builder.end_reasoning()
        self.builder.finish()


def attributes(text: str) -> dict[str, str]:
    """Return the attributes in a tag's text, unescaped."""
    return {
        found[1]: found[2].replace("&quot;", '"').replace("&amp;", "&")
        for found in ATTRIBUTE.finditer(text)
    }


class Xtml(AnswerSyntax, frozen=True, kw_only=True):
    """XTML, with its markers: `open` and `close` start a tag, `separator` ends it."""

    PARSER = XtmlParser

    open: str = "<|open|>"
    close: str = "<|close|>"
    separator: str = "<|sep|>"

    def markers(self) -> tuple[str, ...]:
        return (self.open, self.close, self.separator)

    # ---- the grammar

    def frame(self) -> AnswerFrame:
        return AnswerFrame(
            opens=self._tag("think"),
            closes=self._end_tag("think"),
            before=self._tag("response"),
            after=self._end_tag("response"),
        )

    def write_required(self, grammar: GrammarBuilder) -> Form:
        bodies = [(_attribute(t.name), self._write_arguments(t, grammar)) for t in grammar.tools]

        def call(index: Form | str) -> Form:
            options = (
                sequence(f'tool="{name}" index="', index, f'"{self.separator}', body)
                for name, body in bodies
            )
            return sequence(f"{self.open}call ", either(options), self._end_tag("call"))

        more: Form = LiteralForm("")
        if grammar.many:
            more = grammar.repeated(grammar.rule("call", call(LATER_INDEX)))
        end = optional(LiteralForm(self._end_tag("message")))
        return sequence(self._tag("tools"), call("1"), more, self._end_tag("tools"), end)

    def write_strict(self, grammar: GrammarBuilder) -> Form:
        """Return the grammar of a response and calls. The prompt may have opened the response."""
        required, opener = self.write_required(grammar), self._tag("tools")
        calls = grammar.rule("calls", required)
        end = LiteralForm(self._end_tag("message"))
        closed = sequence(Until(self._end_tag("response")), optional(either((calls, end))))
        broken_off = sequence(Until(opener), without_prefix(opener, required))
        opened = optional(LiteralForm(self._tag("response")))
        return either((calls, sequence(opened, either((closed, broken_off, ANY_TEXT)))))

    def _tag(self, name: str) -> str:
        return f"{self.open}{name}{self.separator}"

    def _end_tag(self, name: str) -> str:
        return f"{self.close}{name}{self.separator}"

    def _write_arguments(self, tool: DeclaredTool, grammar: GrammarBuilder) -> Form:
        """Return the grammar of a call's arguments."""
        if len(tool.name) > MAX_TAG_CHARS // 2:
            raise NotWritable(tool.name, "name", "this format cannot write it")
        ending = ValueEnd(close=self._end_tag("argument"))
        values = Values(json_notation(ending.words), Schemas(tool), grammar)
        plain = PlainValues(values, ending)

        def write(key: str | None, schema: Any, path: str) -> Form | None:
            if key is not None and ("\n" in key or "<|" in key or len(key) > MAX_TAG_CHARS // 2):
                return None
            name = ANY_KEY if key is None else _attribute(key)
            tag = sequence(f'{self.open}argument key="', name, '" type="')
            return sequence(tag, self._write_value(plain, values.schemas.cases(schema, path), path))

        return grammar.rule("arguments", arguments_form(values, write))

    def _write_value(self, plain: PlainValues, cases: Sequence[SchemaCase], path: str) -> Form:
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
                value = plain.of_cases(found, ("string",), path)
            ways.append(sequence(f'{kind}"{self.separator}', value))
        return either(ways)


LATER_INDEX = Pattern("[1-9][0-9]{0,2}")
"""Index of a call after the first. The parser ignores it and counts calls itself."""
TYPE_NAMES = {"integer": "number"}
"""JSON Schema type -> the model's name for it, if that differs."""


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


FORMATS = {"kimi_k3": Xtml()}
