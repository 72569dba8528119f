"""Converts arguments that are written as plain text to JSON, with the types of the tool's schema.

The types of a value come from its schema: `type` (one or a list), `anyOf`, `oneOf`, `allOf`,
`enum`, `const` and local `$ref`s. They are tried in the order null, boolean, integer, number,
object, array. Text that fits none of the allowed types becomes a string, unchanged. So no value is
lost: the client receives even a value of the wrong type as the model wrote it. A value is emitted

    as it arrives     if its only type is string, or its type is unknown
    slightly later    if it may be a string or null: it is held back while it may become `null`
    when complete     if it has any other type

Objects and arrays in JSON are emitted unchanged. Those written as Python literals are rewritten as
JSON. A parameter without a schema is a string, unless the format sets `bare_json`. Then it is JSON
if its text is valid JSON other than a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from gateway.formats.call_parser import CallParser, CallParserState
from gateway.formats.event_builder import BLANKS, EventBuilder
from gateway.formats.json_scanner import LiteralScan
from gateway.formats.json_spelling import json_number, string_json
from gateway.formats.literal_dialect import PYTHON

ORDER = ("null", "boolean", "integer", "number", "object", "array", "string")
MAX_REFS = 16
"""Longest chain of references that is followed. The type of a longer chain is unknown."""

Trim = Literal["nothing", "newline", "blanks"]
"""What is stripped from both ends of a value: nothing, one newline, or all blanks."""

JSON_START = re.compile(r'[{\["\-0-9tfn]')


def kinds_of(schema: Any, root: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Return the JSON types that a schema allows, in the order of ORDER. Return () if it does not
    limit the type, or if its references are nested too deeply to be followed.

    root   the schema that local `$ref`s refer to
    """
    found: set[str] = set()
    _gather(schema, root or {}, found, MAX_REFS)
    return tuple(kind for kind in ORDER if kind in found)


def _gather(schema: Any, root: Mapping[str, Any], found: set[str], depth: int) -> None:
    """Add the types that `schema` allows to `found`, down to `depth` levels of options and
    references.
    """
    if not isinstance(schema, Mapping) or depth == 0:
        return
    declared = schema.get("type")
    if declared is not None:
        found.update(declared if isinstance(declared, list) else [declared])
        if schema.get("nullable") is True:
            found.add("null")
        return
    for value in (*_list(schema, "enum"), *([schema["const"]] if "const" in schema else [])):
        found.add(_kind_of_value(value))
    for keyword in ("anyOf", "oneOf", "allOf"):
        for choice in _list(schema, keyword):
            _gather(choice, root, found, depth - 1)
    if isinstance(schema.get("$ref"), str):
        _gather(_referred(schema["$ref"], root), root, found, depth - 1)
    if not found:
        found.update({"object"} if "properties" in schema else ())
        found.update({"array"} if "items" in schema else ())


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _referred(ref: str, root: Mapping[str, Any]) -> Any:
    if not ref.startswith("#/"):
        return None
    at: Any = root
    for part in ref[2:].split("/"):
        at = at.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(at, Mapping) else None
    return at


def resolved(schema: Any, root: Mapping[str, Any] | None) -> Any:
    """Return the schema to which the `$ref` of `schema` leads within `root`; None if it leads
    nowhere. Return a schema without `$ref` unchanged.

    At most MAX_REFS references are followed. If their chain is longer or circular, the returned
    schema still has a `$ref`.
    """
    for _ in range(MAX_REFS):
        ref = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(ref, str):
            break
        schema = _referred(ref, root or {})
    return schema


def _kind_of_value(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


def schema_of(parameters: Mapping[str, Any] | None, key: str) -> Any:
    """Return the schema of the argument `key` of a tool: that of its property, or else
    `additionalProperties`. Return None if there is neither.

    parameters   the schema of all arguments of the tool
    """
    if not isinstance(parameters, Mapping):
        return None
    properties = parameters.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    additional = parameters.get("additionalProperties")
    return additional if isinstance(additional, Mapping) else None


def typed_json(text: str, kinds: tuple[str, ...], *, bare_json: bool = False) -> str:
    """Return the JSON text of an argument, given its whole `text` as the model wrote it.

    - If `kinds` are given, the value has the first of these types that its text fits. If it fits
      none, it is a string.
    - If `kinds` is empty and `bare_json` is set, text that is valid JSON other than a string is
      returned as it is.
    - Otherwise the value is a string.
    """
    trimmed = text.strip(BLANKS)
    if not kinds and bare_json and (found := json_text(trimmed)) is not None:
        return found
    for kind in kinds:
        found = _as(kind, text if "string" in kinds and kind == "null" else trimmed)
        if found is not None:
            return found
    return string_json(text)


def _as(kind: str, text: str) -> str | None:
    """Return `text` as JSON of the type `kind`, or None if it is not of that type."""
    match kind:
        case "null":
            return "null" if text in ("null", "None") else None
        case "boolean":
            return text.lower() if text.lower() in ("true", "false") else None
        case "integer":
            return json_number(text, whole=True)
        case "number":
            return json_number(text)
        case "object":
            return _nested(text, "{")
        case "array":
            return _nested(text, "[")
    return None


def _nested(text: str, opening: str) -> str | None:
    if text.startswith(opening) and is_json(text):
        return text
    written = python_to_json(text) if text[:1] in ("{", "[", "(") else None
    return written if written is not None and written.startswith(opening) else None


def python_to_json(text: str) -> str | None:
    """Return a complete Python literal as JSON, or None if the text is not such a literal."""
    scan = LiteralScan()
    position, status = scan.scan(text, PYTHON)
    if status == "more":
        status = scan.scan_end()
    if status != "end" or text[position:].strip():
        return None
    return scan.drain()


def json_text(text: str) -> str | None:
    """Return `text` if it is a JSON value other than a string, else None."""
    if not text or text[0] == '"' or not JSON_START.match(text):
        return None
    return text if is_json(text) else None


def is_json(text: str) -> bool:
    """Return whether the text is a JSON value. This takes linear time, because numbers are not
    converted."""
    try:
        JSON_DECODER.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


JSON_DECODER = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=_refuse)
"""Does not compute numbers, and refuses NaN and Infinity."""


def escaped(text: str) -> str:
    """Return `text` with JSON's escapes, as it is written between the quotes of a JSON string."""
    return string_json(text)[1:-1]


class ArgumentsWriter(msgspec.Struct):
    """Writes the arguments of one call as a JSON object.

    count    number of arguments started
    mode     how the current argument is emitted: "string" as it arrives, "nullable" once it is
             certainly not null, "typed" when complete; "" if there is no current argument
    kinds    types that the current argument may have
    lead     whether the value's first character is still to come, so that leading blanks are
             stripped
    parts    the part of the value that is held back
    tail     held-back blanks, which are stripped if the value ends after them
    """

    count: int = 0
    mode: str = ""
    kinds: list[str] = []
    lead: bool = True
    parts: list[str] = []
    tail: list[str] = []

    def start(
        self, key: str, kinds: tuple[str, ...], builder: EventBuilder, *, bare_json: bool = False
    ) -> None:
        """Start the argument `key`, whose value may have the types `kinds`. If `kinds` is empty,
        the value is a string. With `bare_json` it is JSON instead if its text is valid JSON other
        than a string. Pass the same `bare_json` to `end`."""
        builder.arguments_delta(("{" if self.count == 0 else ", ") + string_json(key) + ": ")
        self.count += 1
        self.kinds, self.lead, self.parts, self.tail = list(kinds), True, [], []
        if kinds == ("string",) or not (kinds or bare_json):
            self.mode = "string"
            builder.arguments_delta('"')
        else:
            self.mode = "nullable" if kinds == ("null", "string") else "typed"

    def raw(self, key: str, value: str, builder: EventBuilder) -> None:
        """Write a whole argument, whose `value` is JSON text."""
        builder.arguments_delta(
            ("{" if self.count == 0 else ", ") + string_json(key) + ": " + value
        )
        self.count += 1

    def text(self, text: str, builder: EventBuilder, trim: Trim = "nothing") -> None:
        """Add text to the value of the current argument. `trim` names the characters that are
        stripped from both ends of the value."""
        if self.lead and text:
            if trim == "newline":
                text = text.removeprefix("\n")
            elif trim == "blanks":
                text = text.lstrip(BLANKS)
            self.lead = trim == "blanks" and not text
        if not text:
            return
        if trim != "nothing":
            text = self._without_tail(text, "\n" if trim == "newline" else BLANKS)
        self._value(text, builder)

    def _without_tail(self, text: str, blanks: str) -> str:
        """Return the text without the blanks at its end. They are held back, because they may be
        markup.

        Blanks that earlier calls held back are put before the text if it shows that they are part
        of the value.
        """
        solid = text.rstrip(blanks)
        if not solid and blanks == BLANKS:
            self.tail.append(text)
            return ""
        before, self.tail = "".join(self.tail), []
        if blanks == "\n":
            solid = text[:-1] if text.endswith("\n") else text
        if len(solid) < len(text):
            self.tail.append(text[len(solid) :])
        return before + solid

    def _value(self, text: str, builder: EventBuilder) -> None:
        if self.mode == "string":
            builder.arguments_delta(escaped(text))
            return
        self.parts.append(text)
        if self.mode == "nullable":
            held = "".join(self.parts)
            if not any(null.startswith(held) for null in ("null", "None")):
                self.mode, self.parts = "string", []
                builder.arguments_delta('"' + escaped(held))

    def end(self, builder: EventBuilder, *, bare_json: bool = False) -> None:
        """Complete the current argument: write what is still held back. `bare_json` must have the
        value that `start` got."""
        if self.mode == "string":
            builder.arguments_delta('"')
        elif self.mode:
            text = "".join(self.parts)
            builder.arguments_delta(typed_json(text, tuple(self.kinds), bare_json=bare_json))
        self.mode, self.parts, self.tail = "", [], []

    def close(self, builder: EventBuilder) -> None:
        """Close the object. If it has no arguments, the builder writes `{}`."""
        if self.count:
            builder.arguments_delta("}")


class TypedCallState(CallParserState):
    """State of a `TypedCallParser`.

    name       name of the open call
    arguments  writer of its arguments
    doubtful   a closing tag and the blanks after it, while it is unknown whether the tag ends the
               value or is part of it
    """

    name: str = ""
    arguments: ArgumentsWriter = msgspec.field(default_factory=ArgumentsWriter)
    doubtful: list[str] = []


class TypedCallParser(CallParser):
    """Base of parsers of calls whose values are plain text, typed by the tool's schema.

    In the state "value", text is part of a value. The state "doubt" follows a closing tag that may
    end the value or be a part of it. The text after the tag decides.
    """

    @property
    def trim(self) -> Trim:
        """The characters that are stripped from both ends of a value."""
        return "nothing"

    def start_call(self, name: str) -> None:
        s = self.s
        s.name, s.raw, s.arguments, s.at = name, [], ArgumentsWriter(), "call"
        self.builder.start_call(name)

    def end_call(self, then: str) -> None:
        self.s.arguments.close(self.builder)
        self.builder.end_call()
        self.s.at = then

    def schema_of(self, key: str) -> Any:
        """Return the schema of the argument `key` of the open call; None if there is none."""
        return schema_of(self.builder.parameters(self.s.name), key)

    def kinds_of(self, key: str) -> tuple[str, ...]:
        """Return the types that the schema allows for the argument `key` of the open call, as the
        function `kinds_of` does."""
        return kinds_of(self.schema_of(key), self.builder.parameters(self.s.name))

    def value_text(self, text: str) -> None:
        self.s.arguments.text(text, self.builder, self.trim)

    def in_doubt(self, text: str) -> str:
        """Read text after a closing tag that may be part of the value. Return the text that was not
        read.

        Blanks leave the question open. Any other text shows that the tag is part of the value.
        """
        s = self.s
        rest = text.lstrip(BLANKS)
        s.doubtful.append(text[: len(text) - len(rest)])
        if rest:
            self.was_text()
        return rest

    def was_text(self) -> None:
        """Add the closing tag in `doubtful` to the value, because the tag did not end the value."""
        doubtful, self.s.doubtful = "".join(self.s.doubtful), []
        self.s.at = "value"
        self.value_text(doubtful)

    def on_stray(self, marker: str) -> None:
        if self.s.at == "doubt":
            self.was_text()
        if self.s.at == "value":
            self.value_text(marker)
