"""Grammars of argument values that are written as plain text, up to the marker that ends them.

Every value is written so that the parser (`argument_types.typed_json`) reads it back unchanged:
strings as they are; null, booleans, numbers, arrays and objects as JSON. The parser tries all types
that the schema allows, in its own order, so it may read a string as another type. If that type has
limits, the grammar admits only strings that do not start like a value of that type.

A string without limits is any text up to the first marker that may end it. A string with a length
does not contain the first character of such a marker. A string with a pattern, and one inside JSON,
does not contain a whole marker.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.formats.argument_types import Trim, kinds_of, schema_of, typed_json
from gateway.formats.event_builder import BLANKS
from gateway.formats.grammar_builder import either, sequence
from gateway.formats.schema_cases import SchemaCase, Schemas, anything, same
from gateway.formats.string_limits import (
    Ranges,
    StringEscapes,
    char_ranges,
    contains,
    exactly,
    free_of,
    limited,
    merged,
    with_any_of,
)
from gateway.formats.value_syntax import NUMBERS, Values
from protocol.engine.grammar import Form, Until

UNLIMITED = {"null": "null", "boolean": "true|false", **NUMBERS}
"""Type -> pattern of its values, if the schema sets no limits."""
FIRST_CHARS: dict[str, Ranges] = {
    "null": char_ranges("nN"),
    "boolean": char_ranges("tTfF"),
    "integer": char_ranges("0123456789+-._"),
    "number": char_ranges("0123456789+-._"),
    "object": char_ranges("{[("),
    "array": char_ranges("{[("),
}
"""Type -> first characters of texts that are read as this type."""
STRIPPED: dict[Trim, str] = {"nothing": "", "newline": r"\n?", "blanks": r"[ \n]{0,4}"}
"""What may follow a value because the parser strips it. Without a limit, a model could write blanks
forever."""
CONTAINERS = ("object", "array")
RESERVED_FIRST: Ranges = merged([*char_ranges(BLANKS), *char_ranges('"')])


class ValueEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The marker that ends a value, and the markup around the value.

    close   the marker that ends the value; the value's form includes this marker
    others  other markers at which the parser may end the value, so no value may contain them
    around  text that is written on both sides of the value
    trim    the characters that the parser strips from both ends of the value
    bare    whether the parser reads a value of unknown type as JSON if it is valid JSON
    """

    close: str
    others: tuple[str, ...] = ()
    around: str = ""
    trim: Trim = "nothing"
    bare: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.close, *self.others)))


class PlainValues:
    """Writes the grammars of one tool's plain-text values. `values` writes the grammars of arrays
    and objects."""

    def __init__(self, values: Values, ending: ValueEnd) -> None:
        self.values = values
        self.schemas: Schemas = values.schemas
        self.ending = ending
        self._careful = StringEscapes(never=char_ranges("".join(word[0] for word in ending.words)))

    def argument(self, key: str | None, schema: Any, path: str) -> Form:
        """Return the form of one argument's value and the marker that ends it. The key None stands
        for any undeclared name."""
        root = self.schemas.root
        if key is None:
            return self.value(schema, kinds_of(root.get("additionalProperties"), root), path)
        return self.value(schema, kinds_of(schema_of(root, key), root), path)

    def value(self, schema: Any, kinds: Sequence[str], path: str) -> Form:
        """Return the form of a value and the marker that ends it. `kinds` are the types that the
        parser tries. Raise NotWritable if the schema cannot be enforced."""
        cases = self.schemas.cases(schema, path)
        if not kinds and anything(cases):
            return self.text()
        self.check_kinds(cases, kinds, path)
        return self.of_cases(cases, kinds, path)

    def check_kinds(self, cases: Sequence[SchemaCase], kinds: Sequence[str], path: str) -> None:
        """Raise NotWritable unless the types that the parser tries are those of the schema."""
        if {_kind(kind) for kind in kinds} != {_kind(case.kind) for case in cases}:
            self.schemas.refuse(path, "type", "is missing, or too deeply nested for the parser")

    def of_cases(
        self, cases: Sequence[SchemaCase], kinds: Sequence[str], path: str, apart: Ranges = ()
    ) -> Form:
        """Return the form of a value of one of `cases`, and of the marker that ends it. It admits
        no string that starts with a character in `apart`."""
        strings = [case for case in cases if case.kind == "string"]
        others = [case for case in cases if case.kind != "string"]
        if not any(case.free for case in strings):
            return self._typed(strings, others, kinds, path, apart)
        limited = [case for case in others if not case.free]
        if not limited and not apart:
            return self.text()
        return self._beside_any_string(limited, kinds, path, apart)

    def text(self) -> Form:
        """Return the form of any text and the marker that ends it."""
        others = self.ending.others
        if not others:
            return Until(self.ending.close)
        text = Until(self.ending.close, free_of(others, StringEscapes()))
        return self.values.grammar.define(f"{self.schemas.tool.name}-text", text)

    # ---- several types

    def _beside_any_string(
        self, others: Sequence[SchemaCase], kinds: Sequence[str], path: str, apart: Ranges
    ) -> Form:
        """Return the form of a string, or of a value of one of `others` (cases with limits), and
        of the marker that ends it.

        The string has no limits, but does not start with a character in `apart` or RESERVED_FIRST,
        or with one that could start a value of `others`. So the parser reads it as a string.
        """
        taken = [*apart, *(span for case in others for span in FIRST_CHARS[case.kind])]
        first = StringEscapes(never=merged([*RESERVED_FIRST, *self._careful.never, *taken])).any()
        return self._either(
            [f"(?:{first}{free_of(self.ending.words, StringEscapes())})?"], others, kinds, path
        )

    def _typed(
        self,
        strings: Sequence[SchemaCase],
        others: Sequence[SchemaCase],
        kinds: Sequence[str],
        path: str,
        apart: Ranges,
    ) -> Form:
        """Return the grammar of a value that is one of the limited strings `strings`, or of the
        types in `others`."""
        clashing = [case for case in others if not case.free or case.kind in CONTAINERS]
        taken = [*apart, *(span for case in clashing for span in FIRST_CHARS[case.kind])]
        texts = []
        for case in strings:
            if case.values is not None:
                texts += self._constants(case, kinds, path, merged(taken))
            else:
                texts.append(self._limited(case, merged(taken), path))
        has_pattern = any("pattern" in case.limits or "format" in case.limits for case in strings)
        return self._either(texts, others, kinds, path, self._unreadable() if has_pattern else ())

    def _unreadable(self) -> tuple[str, ...]:
        """Return patterns of the texts that the parser would end too early, or strip."""
        words, off = with_any_of(self.ending.words), self._stripped()
        if not off:
            return (words,)
        edge = StringEscapes().one_of(off)
        return words, f"{edge}(?s:.*)", f"(?s:.*){edge}"

    def _stripped(self) -> Ranges:
        """Return the characters that the parser strips from both ends of a value."""
        edges = {"nothing": "", "newline": "" if self.ending.around else "\n", "blanks": BLANKS}
        return char_ranges(edges[self.ending.trim])

    def _either(
        self,
        texts: list[str],
        others: Sequence[SchemaCase],
        kinds: Sequence[str],
        path: str,
        but_not: tuple[str, ...] = (),
    ) -> Form:
        """Return the form of a value that matches one of the patterns `texts` and none of
        `but_not`, or is one of `others`.

        The result has as few alternatives as possible, because the text of one must not be read as
        the start of another.
        """
        close, around = self.ending.close, self.ending.around
        forms: list[Form] = []
        for case in others:
            if case.values is not None:
                texts = [*texts, *self._constants(case, kinds, path, ())]
            elif case.free and case.kind in UNLIMITED:
                texts = [*texts, UNLIMITED[case.kind]]
            else:
                forms.append(sequence(self.values.case(case, path), around + close))
        if texts:
            text = f"(?:{'|'.join(dict.fromkeys(texts))})"
            if but_not:
                then = exactly(around) or STRIPPED[self.ending.trim]
                forms.append(Until(close, text, but_not, then))
            else:
                forms.append(Until(close, text + exactly(around)))
        if not forms:
            self.schemas.refuse(path, "enum", "has no value that this format can write")
        return sequence(around, either(forms))

    # ---- strings

    def _limited(self, case: SchemaCase, taken: Ranges, path: str) -> str:
        """Return the pattern of strings within the case's limits. They start with no character in
        `taken`, and with no character that the parser would strip. `_unreadable` rules out other
        texts that match a pattern.
        """
        limits, off = case.limits, self._stripped()
        if "pattern" in limits or "format" in limits:
            if taken:
                self.schemas.refuse(path, "pattern", "cannot be enforced beside other types")
            return self._within(StringEscapes(), limits, path)
        if not taken and not off:
            return self._within(self._careful, limits, path)
        return self._with_edges(limits.get("minLength", 0), limits.get("maxLength"), taken, off)

    def _within(self, spelling: StringEscapes, limits: Any, path: str) -> str:
        try:
            return limited(spelling, limits)
        except ValueError as fault:
            self.schemas.refuse(path, "string", str(fault))

    def _with_edges(self, least: int, most: int | None, taken: Ranges, off: Ranges) -> str:
        never = self._careful.never
        first = StringEscapes(
            never=merged([*never, *taken, *off, *(RESERVED_FIRST if taken else ())])
        ).any()
        last = StringEscapes(never=merged([*never, *off])).any()
        between = None if most is None else max(most - 2, 0)
        inner = self._careful.with_length(max(least - 2, 0), between)
        options = [f"{first}{inner}{last}"] if most is None or most > 1 else []
        options += [first] if least <= 1 and most != 0 else []
        options += [""] if least == 0 else []
        return f"(?:{'|'.join(options)})"

    def _constants(
        self, case: SchemaCase, kinds: Sequence[str], path: str, taken: Ranges
    ) -> list[str]:
        """Return a pattern for each of the case's values that the parser reads back unchanged and
        that starts with no character in `taken`."""
        values = case.values or ()
        found = []
        for value in values:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            back = json.loads(typed_json(self._trimmed(text), tuple(kinds)))
            clear = not any(word in text for word in self.ending.words)
            apart = not text or not contains(taken, ord(text[0]))
            if clear and apart and same(back, value):
                found.append(exactly(text))
        return found

    def _trimmed(self, text: str) -> str:
        """Return `text`, framed and then stripped: the value that the parser reads back."""
        text = self.ending.around + text + self.ending.around
        if self.ending.trim == "newline":
            return text.removeprefix("\n").removesuffix("\n")
        return text.strip(BLANKS) if self.ending.trim == "blanks" else text


def _kind(kind: str) -> str:
    """Return the type whose values are written like those of `kind`: "number" for "integer"."""
    return "number" if kind == "integer" else kind
