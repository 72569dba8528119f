"""Parses the structured output fields of a request into a protocol grammar.

`response_format` is OpenAI's field, and `structured_outputs` is vLLM's. The other fields are those
of older vLLM, SGLang and llama.cpp. A request may set only one of them.

Only the shape and size of the fields and the keywords of schemas are checked here. The engine
compiles the grammar. If it cannot enforce the grammar, it refuses the request before any header is
sent.

A keyword of a schema falls into one of four groups:

- `ENFORCED`: the answer matches it.
- `SILENT`: it does not affect which values are valid.
- `UNENFORCEABLE`: refused. The error has its path in the request, such as
  "response_format.json_schema.schema.properties.tags.uniqueItems".
- Unknown: ignored and listed in the response, or refused if the schema is strict.

Errors are InvalidRequest naming the field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Set
from itertools import islice
from typing import Any

import msgspec

from gateway.api.openai.requests import GenerationBody
from gateway.formats.schema_cases import ANNOTATIONS
from gateway.http.json_values import as_object, check_depth
from protocol.engine.grammar import (
    Body,
    ChoiceGrammar,
    Gbnf,
    Grammar,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    Structural,
    Tag,
    check_grammar,
)
from protocol.engine.schema_literals import SchemaPlace, check_literals
from protocol.wire.errors import InvalidRequest
from protocol.wire.field_words import one_of

_LARK_START = "start:"
_FORMATS: Mapping[str, Set[str]] = {
    "text": {"type"},
    "json_object": {"type", "schema"},
    "json_schema": {"type", "json_schema"},
    "structural_tag": {"type", "structures", "triggers"},
}
"""response_format type -> its known members."""
_SCHEMA_MEMBERS = {"name", "description", "schema", "strict"}
"""The members of `response_format.json_schema`."""
_OPTIONS = ("disable_any_whitespace", "disable_additional_properties")
"""Options of `structured_outputs` that clients of vLLM send. Only false is supported."""
_SAFE_PATH = re.compile(r"[A-Za-z0-9_.$\[\]-]{1,200}")
"""Matches a path that is safe in a header. Ignored paths are listed in a header."""


class AnswerForm(msgspec.Struct, frozen=True):
    """The grammar that an answer must match, and the request field that sets it."""

    #: The request field that sets the grammar.
    field: str
    body: Body
    #: Paths of unknown members and schema keywords, which have no effect.
    ignored: list[str] = []


def answer_form(body: GenerationBody) -> AnswerForm | None:
    """Return the grammar that the body's structured output fields set; None if the answer is free
    text."""
    found = []
    for field, read in _FIELDS.items():
        value, reader = getattr(body, field), FormReader()
        form = None if value is None else read(reader, value, field)
        if form is not None:
            found.append(_checked(AnswerForm(field, form, reader.ignored)))
    if len(found) > 1:
        first, second = found[0].field, found[1].field
        raise InvalidRequest.at(second, f"cannot be combined with {first}; set only one of them")
    return found[0] if found else None


def structured_form(value: Any, at: str) -> AnswerForm | None:
    """Return the grammar that a `structured_outputs` value sets; None if the value is None.

    at  path of the value in the request

    Raises InvalidRequest, naming the path, if the value is not a valid form.
    """
    if value is None:
        return None
    reader = FormReader()
    return _checked(AnswerForm(at, reader.structured_outputs(value, at), reader.ignored))


def _checked(form: AnswerForm) -> AnswerForm:
    """Return `form`. Raise InvalidRequest, naming its field, if its grammar is too large for the
    engine. So a text that is too long is never sent to the engine."""
    try:
        check_grammar(Grammar(body=form.body))
    except InvalidRequest as error:
        raise InvalidRequest.at(form.field, error.message) from None
    return form


class FormReader:
    """Parses structured output fields. The argument `at` is the path of `value` in the request."""

    def __init__(self) -> None:
        self.ignored: list[str] = []

    def response_format(self, value: Any, at: str) -> Body | None:
        format = as_object(value, at)
        kind = format.get("type")
        if not isinstance(kind, str) or kind not in _FORMATS:
            raise InvalidRequest.wrong(f"{at}.type", one_of(_FORMATS), kind)
        if kind == "json_schema" and "json_schema" not in format and "schema" in format:
            flat = {name: member for name, member in format.items() if name != "type"}
            return self._named_schema(flat, at)  # llama.cpp's flat shape
        self._note_unknown(format, _FORMATS[kind], at)
        match kind:
            case "json_object" if format.get("schema"):
                return self.schema(format["schema"], f"{at}.schema")
            case "json_object":
                return JsonObject()
            case "json_schema":
                return self._named_schema(format.get("json_schema"), f"{at}.json_schema")
            case "structural_tag":
                return self.structural_tag(format, at)
        return None

    def _named_schema(self, value: Any, at: str) -> Body:
        inner = as_object(value, at)
        strict = inner.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise InvalidRequest.wrong(f"{at}.strict", "true or false", strict)
        self._note_unknown(inner, _SCHEMA_MEMBERS, at, strict=bool(strict))
        return self.schema(inner.get("schema"), f"{at}.schema", strict=bool(strict))

    def _note_unknown(
        self, value: Mapping[str, Any], known: Set[str], at: str, *, strict: bool = False
    ) -> None:
        for name, member in value.items():
            path = f"{at}.{name}"
            if name in known or member is None:
                continue
            if strict:
                raise InvalidRequest.at(path, "unknown member, and strict is true")
            self._note(path, at)

    def _note(self, path: str, at: str) -> None:
        """Record `path` as ignored, or `at` if `path` is not safe in a header."""
        safe = path if _SAFE_PATH.fullmatch(path) else at
        if len(self.ignored) < MAX_UNKNOWN and safe not in self.ignored:
            self.ignored.append(safe)

    def structured_outputs(self, value: Any, at: str) -> Body:
        members = {
            name: member
            for name, member in as_object(value, at).items()
            if member is not None and not (name in _OPTIONS and member is False)
        }
        for name in members:
            if name not in _KINDS:
                raise InvalidRequest.at(
                    f"{at}.{name}", f"unknown member; known: {', '.join(_KINDS)}"
                )
        if len(members) != 1:
            raise InvalidRequest.at(
                at, f"must have exactly one of {', '.join(_KINDS)}; got {len(members)}"
            )
        ((name, member),) = members.items()
        return _KINDS[name](self, member, f"{at}.{name}")

    # ---- schemas

    def schema(self, value: Any, at: str, *, strict: bool = False) -> Body:
        return JsonSchema(text=self._schema_text(value, at, strict=strict))

    def _schema_text(self, value: Any, at: str, *, strict: bool = False) -> str:
        """Return the JSON text of a schema, which the request has as an object or as JSON text. The
        schemas `true` and `false` are refused."""
        schema = as_object(_from_text(value, at), at)
        check_keywords(schema, at, strict=strict)
        check_literals(schema, at)
        for path in unknown_keywords(schema, at):
            self._note(path, at)
        return msgspec.json.encode(schema).decode()

    def json_object(self, value: Any, at: str) -> Body:
        if value is not True:
            raise InvalidRequest.wrong(at, "true or absent", value)
        return JsonObject()

    # ---- other forms

    def regex(self, value: Any, at: str) -> Body:
        return Regex(pattern=_text(value, at))

    def choices(self, value: Any, at: str) -> Body:
        if not isinstance(value, list) or not value:
            raise InvalidRequest.wrong(at, "a list of at least 1 item", value)
        return ChoiceGrammar(
            choices=[_text(choice, f"{at}[{i}]") for i, choice in enumerate(value)]
        )

    def grammar(self, value: Any, at: str) -> Body:
        """Parse a GBNF grammar if the text has `::=` and no rule `start:`, else a Lark grammar."""
        text = _text(value, at)
        return Gbnf(text=text) if "::=" in text and _LARK_START not in text else Lark(text=text)

    def gbnf(self, value: Any, at: str) -> Body | None:
        """Parse a GBNF grammar. Clients of llama.cpp send an empty string for no grammar."""
        return None if value == "" else Gbnf(text=_text(value, at))

    def structural_tag(self, value: Any, at: str) -> Body:
        """Parse an object with `structures`, each {begin, schema, end}, and `triggers`. A trigger
        is the start of one or more `begin` texts. Once the answer contains a trigger, it must
        continue as one of the structures that start with the trigger."""
        value = as_object(_from_text(value, at), at)
        structures, triggers = value.get("structures"), value.get("triggers")
        for name, member in (("structures", structures), ("triggers", triggers)):
            if not isinstance(member, list):
                raise InvalidRequest.wrong(f"{at}.{name}", "a list", member)
        return Structural(
            triggers=[_text(trigger, f"{at}.triggers[{i}]") for i, trigger in enumerate(triggers)],
            tags=[self._tag(tag, f"{at}.structures[{i}]") for i, tag in enumerate(structures)],
        )

    def _tag(self, value: Any, at: str) -> Tag:
        tag = as_object(value, at)
        return Tag(
            begin=_text(tag.get("begin"), f"{at}.begin"),
            schema=self._schema_text(tag.get("schema", {}), f"{at}.schema"),
            end=_text(tag.get("end"), f"{at}.end"),
        )


def _text(value: Any, at: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest.wrong(at, "a string that is not empty", value)
    return value


def _from_text(value: Any, at: str) -> Any:
    """Return the decoded value of a JSON text, or any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        value = msgspec.json.decode(_text(value, at))
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidRequest.at(at, f"not valid JSON: {error}") from None
    check_depth(value, at)
    return value


Read = Callable[[FormReader, Any, str], Body | None]

_KINDS: Mapping[str, Callable[[FormReader, Any, str], Body]] = {
    "json": FormReader.schema,
    "json_object": FormReader.json_object,
    "regex": FormReader.regex,
    "choice": FormReader.choices,
    "grammar": FormReader.grammar,
    "structural_tag": FormReader.structural_tag,
}
"""The members of `structured_outputs`."""

_FIELDS: Mapping[str, Read] = {
    "response_format": FormReader.response_format,
    "structured_outputs": FormReader.structured_outputs,
    "guided_json": FormReader.schema,
    "guided_regex": FormReader.regex,
    "guided_choice": FormReader.choices,
    "guided_grammar": FormReader.grammar,
    "structural_tag": FormReader.structural_tag,
    "regex": FormReader.regex,
    "ebnf": FormReader.gbnf,
    "json_schema": FormReader.schema,
    "grammar": FormReader.gbnf,
}
FORM_FIELDS = tuple(_FIELDS)


# ---- the keywords of a schema

_SUBSCHEMA = ("not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems",
        "unevaluatedProperties", "additionalProperties", "additionalItems", "items")  # fmt: skip
"""Keywords whose value is a schema. In old drafts, `items` may also be a list of schemas."""
_SUBSCHEMA_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
"""Keywords whose value is a list of schemas."""
_SUBSCHEMA_MAP = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose value maps names to schemas."""

ENFORCED = frozenset(
    ("type", "enum", "const", "multipleOf", "minimum", "maximum", "exclusiveMinimum",
     "exclusiveMaximum", "minLength", "maxLength", "pattern", "format", "items", "prefixItems",
     "additionalItems", "minItems", "maxItems", "properties", "patternProperties",
     "additionalProperties", "required", "minProperties", "maxProperties", "allOf", "anyOf",
     "oneOf", "$ref")
)  # fmt: skip
UNENFORCEABLE = frozenset(
    ("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains",
     "dependentRequired", "dependentSchemas", "dependencies", "propertyNames", "unevaluatedItems",
     "unevaluatedProperties", "$dynamicRef", "$dynamicAnchor", "$recursiveRef",
     "$recursiveAnchor")
)  # fmt: skip
"""Keywords that would restrict the answer, but that our grammars cannot express."""
SILENT = ANNOTATIONS | {"id", "$vocabulary", "contentSchema", "xml", "externalDocs"}
"""Keywords that do not affect which values are valid."""


MAX_UNKNOWN = 16
"""Maximum number of unknown members and keywords that a response lists."""


def check_keywords(schema: Any, at: str, *, strict: bool) -> None:
    """Raise InvalidRequest for the first keyword that cannot be enforced.

    at      the path of `schema` in the request
    strict  also refuse unknown keywords
    """
    for parent, keyword in _keywords(schema, at):
        if keyword in UNENFORCEABLE:
            path = _path(parent, keyword)
            raise InvalidRequest.at(path, f"this server cannot enforce the keyword {keyword!r}")
        if strict and _is_unknown(keyword):
            path = _path(parent, keyword)
            raise InvalidRequest.at(
                path, f"{keyword!r} is not a JSON Schema keyword, so strict cannot enforce it"
            )


def unknown_keywords(schema: Any, at: str) -> list[str]:
    """Return the paths of the first MAX_UNKNOWN unknown keywords, which have no effect."""
    found = ((parent, keyword) for parent, keyword in _keywords(schema, at) if _is_unknown(keyword))
    return [_path(parent, keyword) for parent, keyword in islice(found, MAX_UNKNOWN)]


def _path(parent: SchemaPlace, keyword: str) -> str:
    return str(SchemaPlace(parent, f".{keyword}"))


def _is_unknown(keyword: str) -> bool:
    known = keyword in ENFORCED or keyword in UNENFORCEABLE or keyword in SILENT
    return not known and not keyword.startswith("x-")


def _keywords(schema: Any, at: str) -> Iterator[tuple[SchemaPlace, str]]:
    """Yield (place of its schema, keyword) for each keyword of the schema and of the schemas inside
    it. Skip malformed schemas, which the engine refuses."""
    waiting = [(schema, SchemaPlace(None, at))]
    while waiting:
        schema, place = waiting.pop()
        if not isinstance(schema, Mapping):
            continue
        for keyword, value in schema.items():
            yield place, keyword
            if keyword in _SUBSCHEMA_MAP and isinstance(value, Mapping):
                inner = SchemaPlace(place, f".{keyword}")
                waiting += [(one, SchemaPlace(inner, f".{name}")) for name, one in value.items()]
            elif keyword in _SUBSCHEMA_LIST and isinstance(value, list):
                inner = SchemaPlace(place, f".{keyword}")
                waiting += [(one, SchemaPlace(inner, f"[{n}]")) for n, one in enumerate(value)]
            elif keyword in _SUBSCHEMA:
                waiting.append((value, SchemaPlace(place, f".{keyword}")))
