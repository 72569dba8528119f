"""Grammars of JSON schemas: which schemas are supported or refused, and how values are written."""

from __future__ import annotations

import re
from math import isfinite
from typing import Any

import pytest

from gateway.formats.event_builder import DeclaredTool
from gateway.formats.gemma import FORMATS
from gateway.formats.grammar_builder import GrammarBuilder, NotWritable
from gateway.formats.plain_values import PlainValues, ValueEnd
from gateway.formats.pythonic import PYTHON_NOTATION
from gateway.formats.schema_cases import SchemaCase, Schemas
from gateway.formats.string_limits import StringEscapes, char_ranges, free_of, limited
from gateway.formats.value_syntax import NUMBERS, Values, arguments_form, json_notation
from protocol.engine.grammar import (
    Either,
    Form,
    GrammarRule,
    Json,
    LiteralForm,
    Pattern,
    Repeat,
    Sequence,
    Until,
)

GEMMA = FORMATS["gemma4"].notation()
VERBATIM = StringEscapes()


def schemas(**properties: Any) -> Schemas:
    return Schemas(DeclaredTool("f", {"type": "object", "properties": properties}))


def cases(schema: Any, **properties: Any) -> list[SchemaCase]:
    return schemas(**properties).cases(schema, "parameters")


def test_types_enumerations_and_combinations_become_cases() -> None:
    assert cases({"type": ["string", "null"], "maxLength": 3}) == [
        SchemaCase("null"),
        SchemaCase("string", {"maxLength": 3}),
    ]
    assert cases({"enum": ["a", 1, None]}) == [
        SchemaCase("string", {}, ["a"]),
        SchemaCase("number", {}, [1]),
        SchemaCase("null", {}, [None]),
    ]
    assert cases({"type": "integer", "enum": [1, 5, "x"], "minimum": 2}) == [
        SchemaCase("integer", {}, [5])
    ]
    assert cases({"$ref": "#/properties/n", "minimum": 3}, n={"type": "number", "minimum": 1}) == [
        SchemaCase("number", {"minimum": 3})
    ]
    assert cases({"type": "integer", "nullable": True}) == [
        SchemaCase("null"),
        SchemaCase("integer"),
    ]
    assert {case.kind for case in cases({"description": "any"})} == {
        *("null", "boolean", "number", "object", "array", "string")
    }


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {}}, "not"),
        ({"type": "object", "patternProperties": {}}, "patternProperties"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "dependentRequired": {}}, "dependentRequired"),
        ({"type": "text"}, "type"),
        ({"$ref": "#/$defs/gone"}, "$ref"),
        ({"$ref": "#/properties/self"}, "$ref"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        (False, "false"),
        ({"type": 3}, "type"),
        ({"type": ["string", {}]}, "type"),
        ({"type": "string", "minLength": "x"}, "minLength"),
        ({"type": "string", "maxLength": -1}, "maxLength"),
        ({"properties": ["a"]}, "properties"),
        ({"required": "a"}, "required"),
        ({"enum": {}}, "enum"),
        ({"enum": ["a"], "pattern": "("}, "pattern"),
        ({"anyOf": {}}, "anyOf"),
        ({"allOf": 1}, "allOf"),
    ],
)
def test_a_constraint_that_cannot_be_enforced_is_refused_by_name(schema: Any, keyword: str) -> None:
    with pytest.raises(NotWritable, match=re.escape(keyword)) as caught:
        cases(schema, self={"$ref": "#/properties/self"})
    assert caught.value.field == "parameters"


def written(values: Values, **properties: Any) -> Form:
    return values.value({"type": "object", "properties": properties}, "parameters")


@pytest.mark.parametrize(
    ("notation", "null", "constant"),
    [
        (json_notation(()), "null", '{"a": [true, "x"]}'),
        (PYTHON_NOTATION, "None", '{"a": [True, "x"]}'),
        (GEMMA, "null", '{a:[true,<|"|>x<|"|>]}'),
    ],
    ids=["json", "python", "gemma"],
)
def test_each_notation_has_its_own_words(notation: Any, null: str, constant: str) -> None:
    values = Values(notation, schemas(), GrammarBuilder())
    assert values.value({"type": "null"}, "p") == LiteralForm(null)
    assert values.value({"const": {"a": [True, "x"]}}, "p") == LiteralForm(constant)
    assert values.value({"type": "integer", "minimum": 3}, "p") == Json("schema-0")


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("0", {"integer", "number"}),
        ("-12", {"integer", "number"}),
        ("9" * 200, {"integer", "number"}),
        ("9" * 201, set()),
        ("1.50", {"number"}),
        ("-0.5e-307", {"number"}),
        ("6.02E+23", {"number"}),
        ("9" * 200 + ".9e99", {"number"}),
        ("1e400", set()),
        ("1E+100", set()),
        ("007", set()),
        ("1.", set()),
    ],
)
def test_numbers_without_limits_are_those_that_json_readers_can_hold(
    text: str, kinds: set[str]
) -> None:
    assert {kind for kind, pattern in NUMBERS.items() if re.fullmatch(pattern, text)} == kinds
    assert not kinds or isfinite(float(text))


def test_a_schema_that_refers_to_itself_is_a_rule_that_does() -> None:
    tree = {"type": "object", "properties": {"sub": {"$ref": "#/properties/tree"}}}
    grammar = GrammarBuilder()
    form = Values(GEMMA, schemas(tree=tree), grammar).value(tree, "p")
    body = grammar.body(form)
    assert isinstance(form, GrammarRule)
    member = next(name for name in body.rules if "-member-" in name)
    assert body.rules[member] == Sequence([LiteralForm("sub:"), form])


@pytest.mark.parametrize("num", [10, 100])
def test_the_grammar_is_linear_in_optional_members(num: int) -> None:
    grammar = GrammarBuilder()
    written(
        Values(PYTHON_NOTATION, schemas(), grammar),
        **{f"p{n}": {"type": "boolean"} for n in range(num)},
    )
    assert len(grammar.body(LiteralForm("")).rules) <= 3 * num + 2


PLAIN = ValueEnd(close="</p>", trim="newline", around="\n")


@pytest.mark.parametrize(
    ("schema", "form"),
    [
        ({"type": "string"}, Until("</p>")),
        ({"type": ["string", "null"]}, Until("</p>")),
        ({"type": ["string", "integer", "boolean"]}, Until("</p>")),
        ({}, Until("</p>")),
        ({"type": "boolean"}, Sequence([LiteralForm("\n"), Until("</p>", r"(?:true|false)\x{A}")])),
        ({"enum": ["a", "</p>", 1]}, Sequence([LiteralForm("\n"), Until("</p>", r"(?:a|1)\x{A}")])),
        (
            {"type": ["integer", "null"], "minimum": 1},
            Sequence(
                [
                    LiteralForm("\n"),
                    Either(
                        [
                            Sequence([Json("schema-0"), LiteralForm("\n</p>")]),
                            Until("</p>", r"(?:null)\x{A}"),
                        ]
                    ),
                ]
            ),
        ),
    ],
)
def test_each_schema_has_a_form_as_plain_text(schema: Any, form: Form) -> None:
    tool_schemas = schemas(k=schema)
    plain = PlainValues(Values(json_notation(("</p>",)), tool_schemas, GrammarBuilder()), PLAIN)
    assert plain.argument("k", schema, "parameters.properties.k") == form


def test_a_string_beside_numbers_with_bounds_does_not_begin_like_one() -> None:
    schema = {"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string"}]}
    tool_schemas = schemas(k=schema)
    plain = PlainValues(
        Values(json_notation(("</p>",)), tool_schemas, GrammarBuilder()), ValueEnd(close="</p>")
    )
    form = plain.argument("k", schema, "p")
    assert isinstance(form, Either)
    pattern = next(option.pattern for option in form.options if isinstance(option, Until))
    python = re.compile(re.sub(r"\\x\{([0-9A-F]+)\}", _python, pattern))
    assert [bool(python.fullmatch(text)) for text in ("a1", "", "1", "-2", " 3", "<")] == [
        *(True, True, False, False, False, False)
    ]


def _python(found: re.Match[str]) -> str:
    return f"\\U{int(found[1], 16):08x}"


def admits(pattern: str, text: str, spelling: StringEscapes = VERBATIM) -> bool:
    rust = limited(spelling, {"pattern": pattern})
    return re.fullmatch(re.sub(r"\\x\{([0-9A-F]+)\}", _python, rust), text) is not None


@pytest.mark.parametrize(
    "pattern",
    ["^a+$", "b", r"^\d{2,3}-\w*$", "^(?:x|yz)+$", r"^[^\s,]{1,4}$", "^a|b$", r"\.", "^[a-c\\-]?$"],
)
@pytest.mark.parametrize("text", ["a", "aa", "b", "xb.", "12-_", "xyz", "a b", "ab", "", "-", "1-"])
def test_patterns_match_as_in_python(pattern: str, text: str) -> None:
    assert admits(pattern, text) == (re.search(pattern, text) is not None)


def test_a_pattern_never_admits_a_sign_that_cannot_be_written() -> None:
    assert not admits("^[^a]$", "<", StringEscapes(never=char_ranges("<")))
    assert admits("^.$", '\\"', StringEscapes(escapes={'"': '\\"'}))
    assert not admits("^.$", '"', StringEscapes(escapes={'"': '\\"'}))


@pytest.mark.parametrize("pattern", [r"\bx", "(?=a)b", r"(a)\1", "a(", "[a", "x{2}$y", "(^a)"])
def test_a_pattern_that_is_not_regular_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        limited(StringEscapes(), {"pattern": pattern})


def test_a_text_free_of_words_holds_none_of_them_and_everything_else() -> None:
    words = ("</parameter>", "</function>")
    found = re.compile(re.sub(r"\\x\{([0-9A-F]+)\}", _python, free_of(words, StringEscapes())))
    for text in ("", "a<b", "</param", "<</parameter", "</functions>", "</para</p>", "<", "<<<"):
        assert found.fullmatch(text), text
    for text in ("</parameter>", "a</function>b", "<</parameter>", "</par</parameter>"):
        assert not found.fullmatch(text), text


def test_required_arguments_whose_names_cannot_be_written_are_refused_others_left_out() -> None:
    def write(key: str | None, schema: Any, path: str) -> Form | None:
        return LiteralForm(key or "") if key != "a b" else None

    parameters = {"type": "object", "properties": {"a b": {}, "c": {}}}
    tool_schemas = Schemas(DeclaredTool("f", parameters))
    assert arguments_form(Values(PYTHON_NOTATION, tool_schemas, GrammarBuilder()), write) == Repeat(
        LiteralForm("c"), 0, 1
    )
    tool_schemas = Schemas(DeclaredTool("f", {**parameters, "required": ["a b"]}))
    with pytest.raises(NotWritable, match="a b"):
        arguments_form(Values(PYTHON_NOTATION, tool_schemas, GrammarBuilder()), write)


def test_python_strings_are_written_with_either_quote() -> None:
    form = Values(PYTHON_NOTATION, schemas(), GrammarBuilder()).value(
        {"type": "string", "maxLength": 2}, "p"
    )
    assert isinstance(form, Pattern)
    python = re.compile(re.sub(r"\\x\{([0-9A-F]+)\}", _python, form.pattern))
    for text in ("''", '"a"', "'\\'b'", '"\\n\'"'):
        assert python.fullmatch(text), text
    for text in ("'", "'abc'", "'a\n'", "\"a'"):
        assert not python.fullmatch(text), text
