"""Calls whose arguments are elements named after them, which may nest.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="f">]<]minimax[>[<city>Oslo]<]minimax[>[</city>
    ]<]minimax[>[<days>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[</days>
    ]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

    outside  in the stretch, between calls
    call     in a call, between its arguments
    value    in an argument
    tag      behind the mark of a tag, up to its `>`
    broken   what follows is no call; up to the closing tag it is content

Only a tag behind the mark is one; so text may hold any tag without it. A value without elements in
it is typed by the schema (typed_value), and a string is told as it comes. Elements in a value are
an array where the schema says so, or where all of them are called `item`; otherwise an object, in
which a name that comes again makes a list. Text between them is dropped. One of which the schema
says nothing has the type that its text has in JSON. Such a value is told when it is complete. Where
the schema says string, only the argument's own closing tag ends it; any other closing tag ends the
innermost element, whatever it is called.

Source: MiniMax-M3's chat template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.formats.argument_types import (
    ArgumentsWriter,
    kinds_of,
    resolved,
    schema_of,
    string_json,
    typed_json,
)
from gateway.formats.event_builder import BLANKS, PARSE_FAILED, EventBuilder
from gateway.formats.parser import CallParser, Context, MachineState, SectionSyntax

MAX_TAG_CHARS = 512
MAX_DEPTH = 64
INVOKE = re.compile(r"invoke\s+name=[\"']?([^\"'<>]+?)[\"']?\s*")


class Element(msgspec.Struct):
    """An open element of a value. `children` are (name, JSON) of those that are complete."""

    name: str
    schema: Any = None
    text: list[str] = []
    children: list[tuple[str, str]] = []


class NestedElements(SectionSyntax, frozen=True, kw_only=True):
    """mark     stands before every tag
    stretch  the element around all calls
    """

    mark: str
    stretch: str = "tool_call"

    def markers(self) -> tuple[str, ...]:
        return ()  # its tags are spelt behind the mark

    def openers(self) -> tuple[str, ...]:
        return (f"{self.mark}<{self.stretch}>",)

    def section(
        self, context: Context, teller: EventBuilder, state: Mapping[str, Any] | None = None
    ) -> CallParser:
        return NestedElementsSection(self, context, teller, state)


class NestedElementsState(MachineState):
    """before     the state before the tag at hand
    tag        its text so far
    name       of the open call
    arguments  of the open call
    plain      the argument at hand is a string for certain, and is told as it comes
    stack      the open elements, the argument itself first
    raw        the stretch's text until a call is told: it may have to be given back
    """

    at: str = "outside"
    before: str = ""
    tag: str = ""
    name: str = ""
    arguments: ArgumentsWriter = msgspec.field(default_factory=ArgumentsWriter)
    plain: bool = False
    stack: list[Element] = []
    raw: list[str] = []


class NestedElementsSection(CallParser):
    syntax: NestedElements

    State = NestedElementsState

    def table(self) -> Mapping[str, tuple[str, ...]]:
        return dict.fromkeys(("outside", "call", "value", "tag", "broken"), (self.syntax.mark,))

    def on_open(self, marker: str) -> None:
        self.s.raw = [marker]

    # ---- text

    def on_text(self, text: str) -> str:
        s = self.s
        match s.at:
            case "tag":
                return self._in_tag(text)
            case "value":
                self._value_text(text)
            case "broken":
                self.teller.content(text)
            case "outside":
                return self._outside_calls(text)
        return ""

    def _outside_calls(self, text: str) -> str:
        s = self.s
        rest = text.lstrip(BLANKS)
        if s.raw:
            s.raw.append(text[: len(text) - len(rest)])
        if rest and s.raw:
            self._give_back("a marker of tool calls with no call behind it")
            s.done = True
        elif rest:
            self.teller.warn(PARSE_FAILED, "text between tool calls")
            s.at = "broken"
        return rest

    def _value_text(self, text: str) -> None:
        s = self.s
        if s.plain:
            s.arguments.text(text, self.teller)
        else:
            s.stack[-1].text.append(text)

    # ---- tags

    def on_marker(self, marker: str) -> None:
        s = self.s
        if s.at == "tag":
            self._no_tag()
        s.before, s.tag, s.at = s.at, "", "tag"

    def _in_tag(self, text: str) -> str:
        s = self.s
        end = text.find(">")
        s.tag += text if end < 0 else text[: end + 1]
        if s.tag[:1] != "<" or len(s.tag) > MAX_TAG_CHARS or (end < 0 and "\n" in s.tag):
            self._no_tag()
            return "" if end < 0 else text[end + 1 :]
        if end < 0:
            return ""
        s.at = s.before
        if not self._tag(s.tag[1:-1].strip()):
            s.at = "tag"
            self._no_tag()
        return text[end + 1 :]

    def _no_tag(self) -> None:
        """The mark, and no tag of ours behind it: text, wherever it stands."""
        s = self.s
        s.at = s.before
        text = self.syntax.mark + s.tag
        if s.at == "value":
            self._value_text(text)
        elif s.at == "broken":
            self.teller.content(text)
        elif s.raw:
            s.raw.append(text)
            self._give_back("a marker of tool calls with no call behind it")
            s.done = True
        elif s.at == "outside":
            self.teller.give_back(text, "text between tool calls")
            s.at = "broken"

    def _tag(self, tag: str) -> bool:
        """A tag behind the mark; whether it means anything here."""
        s = self.s
        match s.at:
            case "value":
                return self._tag_in_value(tag)
            case "call" if tag == "/invoke":
                self._end_call()
            case "call" if tag != "/" + self.syntax.stretch:
                return self._begin_argument(tag)
            case _ if tag == "/" + self.syntax.stretch:
                self._end_stretch()
            case "outside" | "broken" if found := INVOKE.fullmatch(tag):
                s.name, s.raw, s.arguments, s.at = found[1], [], ArgumentsWriter(), "call"
                self.teller.begin(s.name)
            case _:
                return False
        return True

    def _end_call(self) -> None:
        self.s.arguments.close(self.teller)
        self.teller.end()
        self.s.at = "outside"

    def _end_stretch(self) -> None:
        s = self.s
        if self.teller.is_open:
            self._end_call()
        elif s.raw:
            s.raw.append(self.syntax.mark + s.tag)
            self._give_back("a marker of tool calls with no call behind it")
        s.done = True

    # ---- values

    def _begin_argument(self, key: str) -> bool:
        s = self.s
        if not key or key.startswith("/"):
            return False
        parameters = self.teller.parameters(s.name)
        schema = schema_of(parameters, key)
        kinds = kinds_of(schema, parameters)
        s.plain = kinds == ("string",)
        s.stack = [Element(key, schema)]
        s.at = "value"
        if s.plain:
            s.arguments.begin(key, kinds, self.teller)
        return True

    def _tag_in_value(self, tag: str) -> bool:
        s = self.s
        top = s.stack[-1]
        if tag == "/" + top.name:
            self._end_element()
            return True
        if s.plain or not tag or len(s.stack) >= MAX_DEPTH:
            return False
        if tag.startswith("/"):
            ours = tag in ("/invoke", "/" + self.syntax.stretch)
            if not ours:
                self._end_element()
            return not ours
        schema = child_schema(top.schema, tag, self.teller.parameters(s.name))
        s.stack.append(Element(tag, schema))
        return True

    def _end_element(self) -> None:
        s = self.s
        element = s.stack.pop()
        if s.plain:
            s.arguments.end(self.teller)
            s.at = "call"
            return
        root = self.teller.parameters(s.name)
        value = element_json(element, root, is_nested=bool(s.stack))
        if s.stack:
            s.stack[-1].children.append((element.name, value))
            return
        s.arguments.raw(element.name, value, self.teller)
        s.at = "call"

    def on_stray(self, marker: str) -> None:
        if self.s.at == "value":
            self._value_text(marker)

    # ---- the end

    def on_end(self, complete: bool) -> None:
        s = self.s
        if not complete:
            self.teller.drop()
        elif self.teller.is_open:
            self.teller.warn(PARSE_FAILED, "the last tool call is not finished")
            self.teller.drop()
        elif s.at == "tag":
            self._no_tag()
        if s.raw and complete:
            self._give_back("a tool call that is not finished")


def child_schema(schema: Any, name: str, root: Mapping[str, Any] | None) -> Any:
    """The schema of an element in a value."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return None
    for one in (schema, *(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        choice = resolved(one, root)
        if isinstance(choice, Mapping) and isinstance(choice.get("items"), Mapping):
            return choice["items"]
        if (found := schema_of(choice, name)) is not None:
            return found
    return None


def element_json(element: Element, root: Mapping[str, Any] | None, *, is_nested: bool) -> str:
    kinds = kinds_of(element.schema, root)
    if element.children:
        names = {name for name, _ in element.children}
        if "array" in kinds or ("object" not in kinds and names == {"item"}):
            return "[" + ", ".join(value for _, value in element.children) + "]"
        return _object(element.children)
    text = "".join(element.text)
    if "string" not in kinds and not text.strip(BLANKS):
        if "array" in kinds:
            return "[]"
        if "object" in kinds:
            return "{}"
    return typed_json(text, kinds, bare_json=is_nested)


def _object(children: list[tuple[str, str]]) -> str:
    values: dict[str, list[str]] = {}
    for name, value in children:
        values.setdefault(name, []).append(value)
    return "{" + ", ".join(_member(name, found) for name, found in values.items()) + "}"


def _member(name: str, values: list[str]) -> str:
    value = values[0] if len(values) == 1 else "[" + ", ".join(values) + "]"
    return f"{string_json(name)}: {value}"


FORMATS = {"minimax_m3": NestedElements(mark="]<]minimax[>[")}
