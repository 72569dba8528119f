"""Grammars of values in brackets, as JSON, Python and Gemma write them.

A schema's grammar is that of its cases (`schema_cases`). Numbers are JSON numbers within their
bounds. Strings have the notation's spelling. Arrays and objects are brackets around values.
Properties come in the schema's order, and optional ones may be left out. If the schema declares
properties, there are no others. The grammar may be narrower than the schema, but never wider.

Each array or object is a rule of its own, and equal ones share a rule. So schemas may refer to
themselves, and the size of the grammar is linear in theirs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.formats.grammar_builder import GrammarBuilder, either, optional, sequence
from gateway.formats.schema_cases import ANYTHING, Limits, SchemaCase, Schemas
from gateway.formats.string_limits import (
    CONTROLS,
    StringEscapes,
    char_ranges,
    free_of,
    limited,
    with_any_of,
)
from protocol.engine.grammar import Form, GrammarRule, LiteralForm, Pattern, Repeat, Until

BLANKS = r"[ \n]{0,8}"
"""Blanks inside JSON. Without a limit, a model could write blanks forever."""
EMPTY = LiteralForm("")
WORDS = ("null", "true", "false")
WHOLE = "-?(?:0|[1-9][0-9]{0,199})"
NUMBERS = {
    "integer": WHOLE,
    "number": WHOLE + r"(?:\.[0-9]{1,199})?(?:[eE](?:\+?[0-9]{1,2}|-[0-9]{1,3}))?",
}
"""Type -> pattern of its values, if the schema sets no limits. All of them are less than 1e300,
because JSON readers cannot hold numbers that are too large for a double."""


class Notation(msgspec.Struct, frozen=True, kw_only=True):
    """How a syntax writes values.

    words           null, true and false
    strings         all spellings of a string; constants are written in the first
    bare            whether keys are written without quotes
    object, array   opening and closing brackets
    colon, comma    text between key and value, and between members
    """

    name: str
    strings: Sequence[QuotedStrings] | MarkedStrings
    words: tuple[str, str, str] = WORDS
    bare: bool = False
    object: tuple[Form, Form] = (Pattern(r"\{" + BLANKS), Pattern(BLANKS + r"\}"))
    array: tuple[Form, Form] = (Pattern(r"\[" + BLANKS), Pattern(BLANKS + r"\]"))
    colon: Form = Pattern(": ?")
    comma: Form = Pattern("," + BLANKS)


HEX = "[0-9a-fA-F]"
NUMBERED = rf"\\u(?:[0-9A-CEFa-cef]{HEX}{{3}}|[dD][0-7]{HEX}{{2}})"
"""An escape with a character's number that is not half of a surrogate pair."""
PAIR = rf"\\u[dD][89abAB]{HEX}{{2}}\\u[dD][c-fC-F]{HEX}{{2}}"
JSON_ESCAPES = {
    **{'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"},
    **{"\b": "\\b", "\f": "\\f"},
}


def json_notation(avoid: tuple[str, ...]) -> Notation:
    """Return JSON's notation. Its strings contain none of the words in `avoid`."""
    spelling = StringEscapes(never=CONTROLS, escapes=JSON_ESCAPES, numbered=f"{NUMBERED}|{PAIR}")
    quotes = QuotedStrings('"', spelling, avoid)
    return Notation(name="json", strings=(quotes,))


BARE_KEY = r"""[^\s\x00-\x1f,:={}\[\]()"'<>]{1,64}"""


class Values:
    """Writes the grammars of one tool's values in one notation."""

    def __init__(self, notation: Notation, schemas: Schemas, grammar: GrammarBuilder) -> None:
        self.notation = notation
        self.schemas = schemas
        self.grammar = grammar
        self._names: dict[str, str] = {}
        self._count = 0

    def value(self, schema: Any, path: str) -> Form:
        """Return the form of a value that the schema allows."""
        return either(self.case(case, path) for case in self.schemas.cases(schema, path))

    def anything(self) -> Form:
        """Return the form of any value."""
        return either(self.case(SchemaCase(kind), "parameters") for kind in ANYTHING)

    def case(self, case: SchemaCase, path: str) -> Form:
        """Return the form of a value of this case."""
        null, true, false = self.notation.words
        if case.values is not None:
            return self._constants(case.values, path)
        match case.kind:
            case "null":
                return LiteralForm(null)
            case "boolean":
                return either((LiteralForm(true), LiteralForm(false)))
            case "integer" | "number":
                if not case.limits:
                    return Pattern(NUMBERS[case.kind])
                return self.grammar.json({"type": case.kind, **case.limits})
            case "string":
                return self._string(case.limits, path)
        return self._container(case, path)

    # ---- strings and constants

    def _string(self, limits: Limits, path: str) -> Form:
        strings = self.notation.strings
        try:
            if isinstance(strings, MarkedStrings):
                if not limits:
                    return sequence(strings.mark, Until(strings.mark))
                text, but_not = limited(StringEscapes(), limits), (with_any_of((strings.mark,)),)
                return sequence(strings.mark, Until(strings.mark, text, but_not))
            if limits:
                return Pattern("|".join(one.limited(limits) for one in strings))
            free = Pattern("|".join(one.free() for one in strings))
            return self.grammar.define(
                f"{self.schemas.tool.name}-{self.notation.name}-string", free
            )
        except ValueError as fault:
            self.schemas.refuse(path, "string", str(fault))

    def _constants(self, values: Sequence[Any], path: str) -> Form:
        texts = [text for value in values for text in self._ways(value)]
        if not texts:
            self.schemas.refuse(path, "enum", "has no value that this format can write")
        return either(map(LiteralForm, dict.fromkeys(texts)))

    def _ways(self, value: Any) -> list[str]:
        """Return all spellings of a constant; none if it cannot be written."""
        strings = self.notation.strings
        if isinstance(value, str) and not isinstance(strings, MarkedStrings):
            return [text for one in strings if (text := one.text(value)) is not None]
        text = self.constant(value)
        return [] if text is None else [text]

    def constant(self, value: Any) -> str | None:
        """Return the text of a constant in this notation, or None if the notation cannot write
        it."""
        if isinstance(value, str):
            return self._text(value)
        if value is None or isinstance(value, bool):
            return self.notation.words[0 if value is None else 1 if value else 2]
        if isinstance(value, Mapping):
            members = [(self.key(key), self.constant(each)) for key, each in value.items()]
            if any(key is None or text is None for key, text in members):
                return None
            return "{" + self._joined([f"{key}{self._space(':')}{t}" for key, t in members]) + "}"
        if isinstance(value, list):
            items = [self.constant(each) for each in value]
            return None if None in items else f"[{self._joined([i for i in items if i])}]"
        return json.dumps(value)

    def _joined(self, texts: Sequence[str]) -> str:
        return self._space(",").join(texts)

    def _space(self, sign: str) -> str:
        return sign if self.notation.bare else sign + " "

    def _text(self, text: str) -> str | None:
        strings = self.notation.strings
        if isinstance(strings, MarkedStrings):
            return None if strings.mark in text else strings.mark + text + strings.mark
        return strings[0].text(text)

    def key(self, key: str) -> str | None:
        """Return the text of a key in this notation, or None if the notation cannot write it."""
        if not self.notation.bare:
            return self._text(key)
        forbidden = any(sign in ',:{}[]"' for sign in key)
        return key if key and key == key.strip() and not forbidden else None

    # ---- arrays and objects

    def _container(self, case: SchemaCase, path: str) -> Form:
        key = case.key()
        if key not in self._names:
            self._names[key] = name = self.name(case.kind)
            inside = self._array if case.kind == "array" else self._object
            self.grammar.define(name, inside(case.limits, path))
        return GrammarRule(self._names[key])

    def name(self, hint: str) -> str:
        """Return a new rule name, which starts with the names of the tool and the notation."""
        self._count += 1
        return f"{self.schemas.tool.name}-{self.notation.name}-{hint}-{self._count}"

    def _array(self, limits: Limits, path: str) -> Form:
        opens, closes = self.notation.array
        comma = self.notation.comma
        first, item, least, most = self.items(limits, path)
        if first:
            rest = Repeat(sequence(comma, item), least, most) if most != 0 else EMPTY
            return sequence(opens, *joined(first, comma), rest, closes)
        if most == 0:
            return sequence(opens, closes)
        return sequence(opens, _separated(item, comma, least, most), closes)

    def items(self, limits: Limits, path: str) -> tuple[list[Form], Form, int, int | None]:
        """Return what an array may contain: (forms of its first items, form of every later item,
        minimum number of later items, maximum number of later items or None for no limit)."""
        prefix = limits.get("prefixItems", [])
        first = [self.value(each, f"{path}.prefixItems[{n}]") for n, each in enumerate(prefix)]
        least = max(limits.get("minItems", 0) - len(first), 0)
        most = limits.get("maxItems")
        if most is not None and most < max(len(first), least + len(first)):
            self.schemas.refuse(path, "maxItems", "is too small")
        most = None if most is None else most - len(first)
        schema = limits.get("items", True)
        if schema is False or most == 0:
            if least:
                self.schemas.refuse(path, "items", "admits too few items")
            return first, EMPTY, 0, 0
        return first, self.value(schema, f"{path}.items"), least, most

    def _object(self, limits: Limits, path: str) -> Form:
        opens, closes = self.notation.object
        comma = self.notation.comma
        if (each := self.extra(limits, path)) is not None:
            schema, least, most = each
            member = sequence(self._any_key(), self.notation.colon, self._extra(schema, path))
            return sequence(opens, _separated(member, comma, least, most), closes)

        def write(name: str | None, schema: Any, path: str) -> Form | None:
            key = self.key(name or "")
            if key is None:
                return None
            return sequence(key, self.notation.colon, self.value(schema, path))

        return sequence(opens, self.listed(self.written(limits, path, write), comma), closes)

    def written(self, limits: Limits, path: str, write: ArgumentWriter) -> list[tuple[Form, bool]]:
        """Return (form, required) of each declared member that can be written, in order. Raise
        NotWritable if a required one cannot."""
        found = []
        for name, schema, required in self.members(limits, path):
            form = write(name, schema, f"{path}.properties.{name}")
            if form is not None:
                found.append((form, required))
            elif required:
                self.schemas.refuse(path, name, "is a name that this format cannot write")
        return found

    def _extra(self, schema: Any, path: str) -> Form:
        return self.value(schema, f"{path}.additionalProperties")

    def _any_key(self) -> Form:
        if self.notation.bare:
            return Pattern(BARE_KEY)
        return self._string({}, "parameters")

    def extra(self, limits: Limits, path: str) -> tuple[Any, int, int | None] | None:
        """Return (schema of the values, minimum and maximum number of members) of an object without
        declared names. Return None if the object declares or requires names, or admits no members.
        Raise NotWritable if it needs more than one member, because names could then repeat."""
        schema = limits.get("additionalProperties", True)
        if "properties" in limits or limits.get("required") or schema is False:
            return None
        least, most = limits.get("minProperties", 0), limits.get("maxProperties")
        if least > 1:  # a grammar cannot prevent that a name occurs twice
            self.schemas.refuse(path, "minProperties")
        if most == 0:
            return None
        return schema, least, most

    def members(self, limits: Limits, path: str) -> list[tuple[str, Any, bool]]:
        """Return (name, schema, required) of the members that the schema names, in order, without
        those that must not occur. If `maxProperties` does not admit all of them, return only the
        required ones. Raise NotWritable for a limit that cannot be enforced."""
        declared = limits.get("properties", {})
        required = set(limits.get("required", ()))
        least, most = limits.get("minProperties", 0), limits.get("maxProperties")
        if least > len(required):
            self.schemas.refuse(path, "minProperties")
        if most is not None and most < len(required):
            self.schemas.refuse(path, "maxProperties", "is less than what `required` needs")
        if most is not None and most < len(declared):
            declared = {name: each for name, each in declared.items() if name in required}
        found = [(name, schema, name in required) for name, schema in declared.items()]
        others = [name for name in limits.get("required", ()) if name not in declared]
        schema = limits.get("additionalProperties", True)
        if others and schema is False:
            self.schemas.refuse(path, "required", f"has {others[0]!r}, which no property allows")
        found += [(name, schema, True) for name in others]
        return [one for one in found if one[1] is not False or one[2]]

    def listed(self, members: Sequence[tuple[Form, bool]], comma: Form) -> Form:
        """Return the form of `members`, each (form, required), in order, with commas between those
        that are written. Members that are not required may be left out.

        Each member is a rule, so the grammar contains its form only once.
        """
        shared = [(self._rule("member", form), required) for form, required in members]
        num = len(shared)
        first_required = next((n for n, (_, required) in enumerate(shared) if required), num)
        rests: list[Form] = [EMPTY] * (num + 1)
        for n in range(num - 1, 0, -1):
            form, required = shared[n]
            more = sequence(comma, form)
            rests[n] = self._rule(
                "rest", sequence(more if required else optional(more), rests[n + 1])
            )
        head: Form = EMPTY
        for n in range(min(first_required, num - 1), -1, -1):
            form, required = shared[n]
            begun = sequence(form, rests[n + 1])
            head = begun if required else self._rule("head", either((begun, head)))
        return head

    def some(self, members: Sequence[Form]) -> Form:
        """Return the form of at least one of the members, in order, without separators between
        them."""
        rest: Form = EMPTY
        begun: Form | None = None
        for form in reversed([self._rule("member", member) for member in members]):
            first = sequence(form, rest)
            begun = self._rule("some", first if begun is None else either((first, begun)))
            rest = self._rule("rest", sequence(optional(form), rest))
        assert begun is not None
        return begun

    def _rule(self, hint: str, form: Form) -> Form:
        if isinstance(form, GrammarRule | LiteralForm):
            return form
        return self.grammar.define(self.name(hint), form)


def joined(forms: Sequence[Form], comma: Form) -> list[Form]:
    """Return the forms with `comma` between neighbours."""
    return [part for n, form in enumerate(forms) for part in ([comma, form] if n else [form])]


class QuotedStrings(msgspec.Struct, frozen=True):
    """Strings between two quotes.

    avoid  words that no string may contain, because they would end the surrounding markup
    """

    quote: str
    spelling: StringEscapes
    avoid: tuple[str, ...] = ()

    def free(self) -> str:
        """Return a pattern of all strings."""
        inner = free_of(self.avoid, self.spelling) if self.avoid else f"{self.spelling.any()}*"
        return self._between(inner)

    def limited(self, limits: Limits) -> str:
        """Return a pattern of strings within the limits. Raise ValueError, naming the keyword, if
        that is impossible."""
        return self._between(limited(self._careful, limits))

    def text(self, text: str) -> str | None:
        """Return `text` with its quotes, or None if it cannot be written."""
        inner = self.spelling.text(text)
        if inner is None or any(word in inner for word in self.avoid):
            return None
        return self.quote + inner + self.quote

    def _between(self, inner: str) -> str:
        return self.quote + inner + self.quote

    @property
    def _careful(self) -> StringEscapes:
        """The spelling without the first characters of the words in `avoid`."""
        never = char_ranges("".join(word[0] for word in self.avoid))
        return msgspec.structs.replace(self.spelling, never=[*self.spelling.never, *never])


class MarkedStrings(msgspec.Struct, frozen=True):
    """Strings between two equal markers. They may contain any text except the marker."""

    mark: str


# ---- a tool's arguments

PATH = "parameters"

ArgumentWriter = Callable[[str | None, Any, str], Form | None]
"""Function (name, schema, path) -> the form of one argument, or None if the format cannot write the
name.

The name None stands for any undeclared name; `schema` is then the schema of its value.
"""


def arguments_form(values: Values, write: ArgumentWriter, comma: Form | None = None) -> Form:
    """Return the form of all arguments of one call of the tool of `values`, in the schema's order.

    write   returns the form of one argument
    comma   form between two arguments; None: no separators
    """
    schemas = values.schemas
    return either(
        _members(values, case.limits, write, comma)
        for case in schemas.cases(schemas.root, PATH)
        if case.kind == "object" or _refuse_kind(schemas)
    )


def _refuse_kind(schemas: Schemas) -> bool:
    """Raise NotWritable if the tool's parameters declare a type. Otherwise return False, so that
    the cases of types other than object are ignored."""
    if schemas.root and "type" in schemas.root:
        schemas.refuse(PATH, "type", "must be 'object'")
    return False


def _members(values: Values, limits: Any, write: ArgumentWriter, comma: Form | None) -> Form:
    if (extra := values.extra(limits, PATH)) is not None:
        schema, least, most = extra
        member = write(None, schema, f"{PATH}.additionalProperties")
        assert member is not None, "every format can write arguments of any name"
        return (
            Repeat(member, least, most) if comma is None else _separated(member, comma, least, most)
        )
    found = values.written(limits, PATH, write)
    if comma is not None:
        return values.listed(found, comma)
    return sequence(*(form if required else optional(form) for form, required in found))


def _separated(item: Form, comma: Form, least: int, most: int | None) -> Form:
    """Return the form of `least` to `most` items, separated by commas."""
    more = Repeat(sequence(comma, item), max(least - 1, 0), most and most - 1)
    items = sequence(item, EMPTY if most == 1 else more)
    return items if least else optional(items)
