"""Calls whose arguments are nested elements, written. See `tools/nested_elements`.

A string ends where the next tag begins. Elements in a value are declared members, each at most
once, or the items of an array. Where a name may be any, so may the value: a name that comes again
makes a list of both values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.formats.argument_types import kinds_of, schema_of
from gateway.formats.event_builder import DeclaredTool
from gateway.formats.grammar.arguments import arguments
from gateway.formats.grammar.forms import either, optional, sequence, several
from gateway.formats.grammar.plain import CONTAINERS, Ending, PlainValues
from gateway.formats.grammar_builder import GrammarBuilder, NotWritable
from gateway.formats.nested_elements import (
    INVOKE,
    MAX_TAG_CHARS,
    NestedElements,
    child_schema,
)
from gateway.formats.schema_cases import SchemaCase, Schemas, anything
from gateway.formats.string_escapes import signs
from gateway.formats.value_syntax import Values, json_notation
from protocol.grammar import Form, GrammarRule, LiteralForm, Pattern, Repeat, Until

ANY_DEPTH = 3
"""So deep elements may nest of which nothing is known."""
NEWLINE = optional(LiteralForm("\n"))


def stretch(
    syntax: NestedElements,
    opener: str,
    tools: Sequence[DeclaredTool],
    many: bool,
    book: GrammarBuilder,
) -> Form:
    mark = syntax.mark
    call = book.rule("call", either(_call(syntax, tool, book) for tool in tools))
    begun = sequence('<invoke name="', call, "\n", mark)
    return sequence("\n", mark, several(begun, many=many), f"</{syntax.stretch}>")


def _call(syntax: NestedElements, tool: DeclaredTool, book: GrammarBuilder) -> Form:
    if not INVOKE.fullmatch(f'invoke name="{tool.name}"'):
        raise NotWritable(tool.name, "name", "this format cannot write it")
    elements = _Elements(syntax, tool, book)
    inside = arguments(elements.values, elements.argument)
    return sequence(f'{tool.name}">', NEWLINE, syntax.mark, inside, "</invoke>")


class _Elements:
    """The elements of one tool's arguments.

    A mark is written before each tag. So what an element holds ends with a mark, and a mark stands
    behind every element, for the next tag: what may follow then differs in its first signs.
    """

    def __init__(self, syntax: NestedElements, tool: DeclaredTool, book: GrammarBuilder) -> None:
        mark = self.mark = syntax.mark
        name = _any_name(("invoke", syntax.stretch))
        self.opening, self.closing = Pattern(f"<{name}>"), Pattern(f"</{name}>")
        self.schemas = Schemas(tool)
        self.book = book
        self.values = Values(json_notation((mark,)), self.schemas, book)
        self.plain = PlainValues(self.values, Ending(close=mark))
        self._names: dict[str, str] = {}

    def argument(self, key: str | None, schema: Any, path: str) -> Form | None:
        root = self.schemas.root
        if key is None:
            self._must_be_free(schema, path)
            return sequence(self._any_element(), self.mark)
        element = self.element(key, schema, schema_of(root, key), path)
        return None if element is None else sequence(element, self.mark)

    def element(self, name: str, schema: Any, seen: Any, path: str) -> Form | None:
        """From its opening tag to its closing one; None: it cannot be written. `seen`: the schema
        that the reader sees."""
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

    def _anything(self, depth: int = ANY_DEPTH) -> Form:
        """Text, or elements, each with text behind it that says nothing."""
        text = Until(self.mark)
        if depth == 0:
            return text
        child = sequence(self.opening, self._anything(depth - 1), self.closing, text)
        return self.book.define(f"any-element-{depth}", sequence(text, Repeat(child)))

    def _any_element(self) -> Form:
        return sequence(self.opening, self._anything(), self.closing)

    def _must_be_free(self, schema: Any, path: str) -> None:
        """A name that comes twice makes a list of the values."""
        if not anything(self.schemas.cases(schema, path)):
            self.schemas.refuse(path, "additionalProperties")

    # ---- elements in elements

    def _mixed(
        self, cases: Sequence[SchemaCase], kinds: Sequence[str], seen: Any, path: str
    ) -> Form:
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
        text = self.plain.of(scalars, kinds, path, signs("{[("))
        if any(case.free for case in strings):  # it may be empty; before elements, text is dropped
            return sequence(text, optional(children))
        if any(case.values is None or "" in case.values for case in strings):
            self.schemas.refuse(path, "string", "cannot be limited beside objects and arrays")
        return either((text, sequence(self.mark, children)))

    def _container(self, case: SchemaCase, seen: Any, path: str, empty: bool) -> Form:
        """Its elements, and a mark behind each."""
        if case.values is not None:
            self.schemas.refuse(path, "enum", "cannot be enforced for objects and arrays")
        key = f"{case.key()} {empty} {seen!r}"
        if key not in self._names:
            self._names[key] = name = self.values.name(case.kind)
            inside = self._items if case.kind == "array" else self._members
            self.book.define(name, inside(case, seen, path, empty))
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
        found: list[tuple[Form, bool]] = []
        for name, schema, required in self.values.members(case.limits, path):
            within = child_schema(seen, name, self.schemas.root)
            member = self.element(name, schema, within, f"{path}.properties.{name}")
            if member is not None:
                found.append((sequence(member, self.mark), required))
            elif required:
                self.schemas.refuse(path, name, "is no name that this format can write")
        if not empty and not any(required for _, required in found):
            return self._at_least_one([member for member, _ in found], path)
        return sequence(*(form if required else optional(form) for form, required in found))

    def _at_least_one(self, members: Sequence[Form], path: str) -> Form:
        """Without any, the text alone would be the value."""
        if not members:
            self.schemas.refuse(path, "properties", "are none: beside a string it would be one")
        return self.values.some(members)


def _is_tag(name: str) -> bool:
    forbidden = any(sign in "<>\r\n" for sign in name) or name.startswith("/")
    return bool(name) and not forbidden and name == name.strip() and len(name) < MAX_TAG_CHARS - 3


def _any_name(taken: Sequence[str]) -> str:
    """Any element's name that begins with none of these, which share no first sign."""
    firsts = "".join(word[0] for word in taken)
    ways = [rf"[^\s<>/{firsts}][^\s<>]{{0,63}}"]
    for word in taken:
        way = rf"(?:[^\s<>{word[-1]}][^\s<>]{{0,63}})?"
        for sign in reversed(word[1:-1]):
            way = rf"(?:[^\s<>{sign}][^\s<>]{{0,63}}|{sign}{way})?"
        ways.append(word[0] + way)
    return f"(?:{'|'.join(ways)})"
