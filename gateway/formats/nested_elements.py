"""Calls whose arguments are XML-like elements, named after the arguments, which may nest.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="f">]<]minimax[>[<city>Oslo]<]minimax[>[</city>
    ]<]minimax[>[<days>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[</days>
    ]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

The states are:

    outside  in the group, between calls
    call     in a call, between its arguments
    value    in an argument
    tag      after the mark of a tag, up to the tag's `>`
    broken   in text that is not a call, which is content up to the closing tag

A mark (`]<]minimax[>[`) precedes every tag, so text may contain any tag without a mark. A value
without elements is typed by the schema (`argument_types`), and a string is emitted as it arrives. A
value with elements is an array if the schema allows one, or if all elements are called `item` and
the schema allows no object. Otherwise it is an object, in which a repeated name makes a list. Text
between elements is dropped. Without a schema, an argument is a string, and a nested element has the
type that its text has in JSON; both are emitted when complete. If the schema allows only a string,
only the argument's own closing tag ends the value. Otherwise any closing tag, whatever its name,
ends the innermost element.

In the grammar, a string ends where the next tag starts. Elements in a value are the items of an
array, or declared members, each at most once. Undeclared names are supported only if the schema
allows any value for them, because a repeated name makes a list of both values.

Source: MiniMax-M3's chat template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.formats.argument_types import (
    TypedCallParser,
    TypedCallState,
    kinds_of,
    resolved,
    schema_of,
    typed_json,
)
from gateway.formats.call_parser import NO_CALL, CallParser, CallSyntax
from gateway.formats.event_builder import BLANKS, DeclaredTool
from gateway.formats.grammar_builder import (
    LINE_BREAK,
    GrammarBuilder,
    NotWritable,
    either,
    optional,
    sequence,
)
from gateway.formats.json_spelling import string_json
from gateway.formats.parser import Moves
from gateway.formats.plain_values import CONTAINERS, PlainValues, ValueEnd
from gateway.formats.schema_cases import SchemaCase, Schemas, anything
from gateway.formats.string_limits import char_ranges
from gateway.formats.value_syntax import Values, arguments_form, json_notation
from gateway.text.markers import match_end
from protocol.engine.grammar import Form, GrammarRule, LiteralForm, Pattern, Repeat, Until

MAX_TAG_CHARS = 512
IN_TAG = re.compile(r"[^>\n]*+")
MAX_DEPTH = 64
INVOKE = re.compile(r"invoke\s+name=[\"']?([^\"'<>]+?)[\"']?\s*")


class Element(msgspec.Struct):
    """An open element of a value. `children` has (name, JSON) of each complete child element."""

    name: str
    schema: Any = None
    text: list[str] = []
    children: list[tuple[str, str]] = []


class NestedElementsState(TypedCallState):
    """State of a `NestedElementsParser`.

    before  the state before the current tag
    tag     the current tag so far, without its mark
    plain   whether the current argument is certainly a string, which is emitted as it arrives
    stack   the open elements, the argument itself first
    """

    at: str = "outside"
    before: str = ""
    tag: str = ""
    plain: bool = False
    stack: list[Element] = []


class NestedElementsParser(TypedCallParser):
    State = NestedElementsState
    syntax: NestedElements

    def moves(self) -> Moves:
        mark = ((self.syntax.mark,), self._start_tag)
        return dict.fromkeys(("outside", "call", "value", "tag", "broken"), (mark,))

    def value_text(self, text: str) -> None:
        if self.s.plain:
            super().value_text(text)
        else:
            self.s.stack[-1].text.append(text)

    # ---- tags

    def _start_tag(self, marker: str) -> None:
        s = self.s
        if s.at == "tag":
            self._no_tag()
        s.before, s.tag, s.at = s.at, "", "tag"

    def _in_tag(self, text: str) -> str:
        s = self.s
        if not s.tag and text[0] != "<":
            self._no_tag()
            return text
        end = min(match_end(IN_TAG, text), MAX_TAG_CHARS - len(s.tag))
        s.tag += text[:end]
        if end == len(text):
            return ""
        if text[end] != ">":
            self._no_tag()
            return text[end:]
        s.tag += ">"
        s.at = s.before
        if not self._tag(s.tag[1:-1].strip()):
            s.at = "tag"
            self._no_tag()
        return text[end + 1 :]

    TEXT = {
        "outside": CallParser.outside_calls,
        "tag": _in_tag,
        "value": value_text,
        "broken": CallParser.as_content,
    }

    def _no_tag(self) -> None:
        """Handle a mark that no known tag follows: it is text, which is dropped between
        arguments."""
        s = self.s
        s.at = s.before
        text = self.syntax.mark + s.tag
        if s.at == "value":
            self.value_text(text)
        elif s.at == "broken":
            self.builder.content(text)
        elif s.raw:
            s.raw.append(text)
            self.reject(NO_CALL)
            s.done = True
        elif s.at == "outside":
            self.builder.reject_call(text, "text between tool calls")
            s.at = "broken"

    def _tag(self, tag: str) -> bool:
        """Handle the tag after a mark. Return whether the tag has a meaning in this state."""
        s = self.s
        match s.at:
            case "value":
                return self._tag_in_value(tag)
            case "call" if tag == "/invoke":
                self.end_call("outside")
            case "call" if tag != "/" + self.syntax.group:
                return self._begin_argument(tag)
            case _ if tag == "/" + self.syntax.group:
                self._end_group()
            case "outside" | "broken" if found := INVOKE.fullmatch(tag):
                self.start_call(found[1])
            case _:
                return False
        return True

    def _end_group(self) -> None:
        s = self.s
        if self.builder.is_open:
            self.end_call("outside")
        elif s.raw:
            s.raw.append(self.syntax.mark + s.tag)
            self.reject(NO_CALL)
        s.done = True

    # ---- values

    def _begin_argument(self, key: str) -> bool:
        s = self.s
        if not key or key.startswith("/"):
            return False
        kinds = self.kinds_of(key)
        s.plain = kinds == ("string",)
        s.stack = [Element(key, self.schema_of(key))]
        s.at = "value"
        if s.plain:
            s.arguments.start(key, kinds, self.builder)
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
            ours = tag in ("/invoke", "/" + self.syntax.group)
            if not ours:
                self._end_element()
            return not ours
        schema = child_schema(top.schema, tag, self.builder.parameters(s.name))
        s.stack.append(Element(tag, schema))
        return True

    def _end_element(self) -> None:
        s = self.s
        element = s.stack.pop()
        if s.plain:
            s.arguments.end(self.builder)
            s.at = "call"
            return
        root = self.builder.parameters(s.name)
        value = element_json(element, root, is_nested=bool(s.stack))
        if s.stack:
            s.stack[-1].children.append((element.name, value))
            return
        s.arguments.raw(element.name, value, self.builder)
        s.at = "call"

    def on_end(self, complete: bool) -> None:
        if complete and self.s.at == "tag" and not self.builder.is_open:
            self._no_tag()
        super().on_end(complete)


def child_schema(schema: Any, name: str, root: Mapping[str, Any] | None) -> Any:
    """Return the schema of the element `name` in a value with `schema`: that of an array's items,
    or of an object's member. Return None if there is none."""
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
    """Return the value of a complete element as JSON text.

    root        the schema of all arguments, to which references refer
    is_nested   false for the element of an argument, true for an element inside it
    """
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


class NestedElements(CallSyntax, frozen=True, kw_only=True):
    """One model's spelling of calls as nested elements.

    mark   marker before every tag
    group  name of the element around all calls
    """

    PARSER = NestedElementsParser

    mark: str
    group: str = "tool_call"

    def markers(self) -> tuple[str, ...]:
        return ()  # its tags are spelt out after the mark

    def signs(self) -> tuple[str, ...]:
        return (self.mark,)

    def openers(self) -> tuple[str, ...]:
        return (f"{self.mark}<{self.group}>",)

    def write_calls(self, opener: str, grammar: GrammarBuilder) -> Form:
        call = grammar.call_rule(lambda tool: self._write_call(tool, grammar))
        begun = sequence('<invoke name="', call, "\n", self.mark)
        return sequence("\n", self.mark, grammar.several(begun), f"</{self.group}>")

    def _write_call(self, tool: DeclaredTool, grammar: GrammarBuilder) -> Form:
        if not INVOKE.fullmatch(f'invoke name="{tool.name}"'):
            raise NotWritable(tool.name, "name", "this format cannot write it")
        elements = _ElementWriter(self, tool, grammar)
        inside = arguments_form(elements.values, elements.argument)
        return sequence(f'{tool.name}">', LINE_BREAK, self.mark, inside, "</invoke>")


MAX_UNKNOWN_DEPTH = 3
"""How deep elements without a schema may nest."""


class _ElementWriter:
    """Writes the grammar of the elements in one tool's arguments.

    A form includes the mark of the tag that follows it. So the content of an element ends with a
    mark, and so does every element. Alternatives after a mark then differ in their first
    characters.
    """

    def __init__(self, syntax: NestedElements, tool: DeclaredTool, grammar: GrammarBuilder) -> None:
        mark = self.mark = syntax.mark
        name = _any_name(("invoke", syntax.group))
        self.opening, self.closing = Pattern(f"<{name}>"), Pattern(f"</{name}>")
        self.schemas = Schemas(tool)
        self.grammar = grammar
        self.values = Values(json_notation((mark,)), self.schemas, grammar)
        self.plain = PlainValues(self.values, ValueEnd(close=mark))
        self._names: dict[str, str] = {}

    def argument(self, key: str | None, schema: Any, path: str) -> Form | None:
        """Return the form of one argument, or None if its name cannot be written. The key None
        stands for any undeclared name."""
        root = self.schemas.root
        if key is None:
            self._must_be_free(schema, path)
            return sequence(self._any_element(), self.mark)
        element = self.element(key, schema, schema_of(root, key), path)
        return None if element is None else sequence(element, self.mark)

    def element(self, name: str, schema: Any, seen: Any, path: str) -> Form | None:
        """Return the form of an element with its tags, or None if its name cannot be written.
        `seen` is the schema that the parser uses for the element.
        """
        if not _is_tag(name):
            return None
        cases = self.schemas.cases(schema, path)
        kinds = kinds_of(seen, self.schemas.root)
        if anything(cases) and not kinds:
            inside = self._anything()
        elif any(case.kind in CONTAINERS for case in cases):
            inside = self._mixed(cases, kinds, seen, path)
        else:
            inside = self.plain.value(schema, kinds, path)
        return sequence(f"<{name}>", inside, f"</{name}>")

    # ---- elements of any name

    def _anything(self, depth: int = MAX_UNKNOWN_DEPTH) -> Form:
        """Return the form of any text, with elements in it up to `depth`."""
        text = Until(self.mark)
        if depth == 0:
            return text
        child = sequence(self.opening, self._anything(depth - 1), self.closing, text)
        return self.grammar.define(f"any-element-{depth}", sequence(text, Repeat(child)))

    def _any_element(self) -> Form:
        return sequence(self.opening, self._anything(), self.closing)

    def _must_be_free(self, schema: Any, path: str) -> None:
        """Raise NotWritable if `schema`, that of undeclared names, has limits. A repeated name
        makes a list of its values, which the limits might not allow."""
        if not anything(self.schemas.cases(schema, path)):
            self.schemas.refuse(path, "additionalProperties")

    # ---- elements in elements

    def _mixed(
        self, cases: Sequence[SchemaCase], kinds: Sequence[str], seen: Any, path: str
    ) -> Form:
        """Return the form of a value that may be an array or an object, and possibly a scalar."""
        self.plain.check_kinds(cases, kinds, path)
        found = {case.kind for case in cases}
        if found >= set(CONTAINERS):
            self.schemas.refuse(path, "type", "admits objects and arrays, which look the same")
        scalars = [case for case in cases if case.kind not in CONTAINERS]
        containers = [case for case in cases if case.kind in CONTAINERS]
        empty = "string" not in found
        children = either(self._container(case, seen, path, empty) for case in containers)
        if not scalars:
            return sequence(self.mark, children)
        strings = [case for case in scalars if case.kind == "string"]
        text = self.plain.of_cases(scalars, kinds, path, char_ranges("{[("))
        if any(case.free for case in strings):  # it may be empty: text before elements is dropped
            return sequence(text, optional(children))
        if any(case.values is None or "" in case.values for case in strings):
            self.schemas.refuse(path, "string", "cannot be limited beside objects and arrays")
        return either((text, sequence(self.mark, children)))

    def _container(self, case: SchemaCase, seen: Any, path: str, empty: bool) -> Form:
        """Return the form of the elements in an array or object, with a mark after each."""
        if case.values is not None:
            self.schemas.refuse(path, "enum", "cannot be enforced for objects and arrays")
        key = f"{case.key()} {empty} {seen!r}"
        if key not in self._names:
            self._names[key] = name = self.values.name(case.kind)
            inside = self._items if case.kind == "array" else self._members
            self.grammar.define(name, inside(case, seen, path, empty))
        return GrammarRule(self._names[key])

    def _items(self, case: SchemaCase, seen: Any, path: str, empty: bool) -> Form:
        limits = case.limits
        if "prefixItems" in limits:
            self.schemas.refuse(path, "prefixItems")
        most, least = limits.get("maxItems"), limits.get("minItems", 0)
        schema = limits.get("items", True)
        if schema is False:
            most = 0
        least = least if empty else max(least, 1)
        if most is not None and most < least:
            self.schemas.refuse(path, "maxItems", "admits too few items")
        if most == 0:
            return LiteralForm("")
        within = child_schema(seen, "item", self.schemas.root)
        item = self.element("item", schema, within, f"{path}.items")
        return Repeat(sequence(item or LiteralForm(""), self.mark), least, most)

    def _members(self, case: SchemaCase, seen: Any, path: str, empty: bool) -> Form:
        if (extra := self.values.extra(case.limits, path)) is not None:
            schema, least, most = extra
            self._must_be_free(schema, f"{path}.additionalProperties")
            least = least if empty else 1
            return Repeat(sequence(self._any_element(), self.mark), least, most)

        def write(name: str | None, schema: Any, path: str) -> Form | None:
            within = child_schema(seen, name or "", self.schemas.root)
            member = self.element(name or "", schema, within, path)
            return None if member is None else sequence(member, self.mark)

        found = self.values.written(case.limits, path, write)
        if not empty and not any(required for _, required in found):
            return self._at_least_one([member for member, _ in found], path)
        return sequence(*(form if required else optional(form) for form, required in found))

    def _at_least_one(self, members: Sequence[Form], path: str) -> Form:
        """Return the form of an object with at least one of `members`. An object without members
        would be read as a string, which the schema allows as well."""
        if not members:
            problem = "must not be empty: an object without members would be read as a string"
            self.schemas.refuse(path, "properties", problem)
        return self.values.some(members)


def _is_tag(name: str) -> bool:
    forbidden = any(sign in "<>\r\n" for sign in name) or name.startswith("/")
    return bool(name) and not forbidden and name == name.strip() and len(name) < MAX_TAG_CHARS - 3


def _any_name(taken: Sequence[str]) -> str:
    """Return a pattern of element names that start with none of the words in `taken`. These words
    must differ in their first letters."""
    firsts = "".join(word[0] for word in taken)
    ways = [rf"[^\s<>/{firsts}][^\s<>]{{0,63}}"]
    for word in taken:
        way = rf"(?:[^\s<>{word[-1]}][^\s<>]{{0,63}})?"
        for sign in reversed(word[1:-1]):
            way = rf"(?:[^\s<>{sign}][^\s<>]{{0,63}}|{sign}{way})?"
        ways.append(word[0] + way)
    return f"(?:{'|'.join(ways)})"


FORMATS = {"minimax_m3": NestedElements(mark="]<]minimax[>[")}
