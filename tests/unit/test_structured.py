"""The structured output fields, and grammars of tool calls that the parser understands."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import msgspec
import pytest

from engine_core.grammar.compiler import Compiler
from gateway.api.openai import requests
from gateway.api.openai.checks import check_chat
from gateway.api.openai.structured import ENFORCED, SILENT, UNENFORCEABLE, answer_form
from gateway.api.openai.tools import tool_grammar, tool_plan
from gateway.formats.choice_parser import AnswerOptions, ParserFactory
from gateway.formats.events import Event, ToolArguments, ToolCall, ToolCallEnd, merged
from gateway.formats.model_format import AnswerStart, ModelOutputFormat
from gateway.http.body import decode
from gateway.text.tokenizer import Tokenizer
from protocol.engine.grammar import (
    MAX_LITERAL_CHARS,
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
    Thinking,
)
from protocol.engine.messages import Output
from protocol.wire.errors import InvalidRequest
from tests.support.grammars import possible
from tests.support.scripted_engine import EOS, marked_ids, thinking_card

OBJECT = {"type": "object"}
CARD = thinking_card()
TOKENIZER = Tokenizer(CARD)
END = frozenset(b'"}')
READING = ModelOutputFormat(CARD, TOKENIZER)
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2]}},
    "required": ["city"],
    "additionalProperties": False,
}


def chat_body(**fields: Any) -> requests.ChatBody:
    data = msgspec.json.encode({"messages": [{"role": "user", "content": "hi"}], **fields})
    return decode(data, requests.ChatBody)


def form(**fields: Any) -> Body | None:
    found = answer_form(chat_body(**fields))
    return found.body if found else None


AT = "response_format.json_schema"
WHITESPACE = "structured_outputs.whitespace_pattern"
AGES = {
    "type": "object",
    "title": "Ages",
    "properties": {"ages": {"type": "array", "items": {"type": "integer", "minimun": 1}}},
}


def asked_for(wanted: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonObject()),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": OBJECT}}},
            JsonSchema(text='{"type":"object"}'),
        ),
        ({"structured_outputs": {"json": OBJECT}}, JsonSchema(text='{"type":"object"}')),
        ({"structured_outputs": {"json": "{}", "regex": None}}, JsonSchema(text="{}")),
        ({"structured_outputs": {"json_object": True}}, JsonObject()),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": False}},
            Regex(pattern="a"),
        ),
        (
            {"response_format": {"type": "json_object", "schema": OBJECT}},
            JsonSchema(text='{"type":"object"}'),
        ),
        ({"response_format": {"type": "json_object", "schema": {}}}, JsonObject()),
        (
            {"response_format": {"type": "json_schema", "schema": OBJECT}},
            JsonSchema(text='{"type":"object"}'),
        ),
        ({"guided_json": OBJECT}, JsonSchema(text='{"type":"object"}')),
        ({"guided_json": '{"type": "object"}'}, JsonSchema(text='{"type":"object"}')),
        ({"guided_regex": "a+"}, Regex(pattern="a+")),
        ({"guided_choice": ["a", "b"]}, ChoiceGrammar(choices=["a", "b"])),
        ({"guided_grammar": 'start: "a"'}, Lark(text='start: "a"')),
        ({"guided_grammar": 'root ::= "a"'}, Gbnf(text='root ::= "a"')),
        ({"regex": "a+"}, Regex(pattern="a+")),
        ({"ebnf": 'root ::= "start:"'}, Gbnf(text='root ::= "start:"')),
        ({"json_schema": '{"type": "object"}'}, JsonSchema(text='{"type":"object"}')),
        ({"grammar": 'root ::= "a"'}, Gbnf(text='root ::= "a"')),
        ({"grammar": ""}, None),
        ({"grammar": "", "json_schema": OBJECT}, JsonSchema(text='{"type":"object"}')),
        ({"guided_json": None, "guided_decoding_backend": "xgrammar"}, None),
        (
            {
                "structural_tag": {
                    "triggers": ["<f"],
                    "structures": [{"begin": "<f=a>", "schema": OBJECT, "end": "</f>"}],
                }
            },
            Structural(
                triggers=["<f"], tags=[Tag(begin="<f=a>", schema='{"type":"object"}', end="</f>")]
            ),
        ),
        ({"structured_outputs": {"regex": "a+"}}, Regex(pattern="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, ChoiceGrammar(choices=["a", "b"])),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Lark(text='start: "a"')),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Gbnf(text='root ::= "a"')),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "triggers": ["<f"],
                    "structures": [{"begin": "<f=a>", "schema": OBJECT, "end": "</f>"}],
                }
            },
            Structural(
                triggers=["<f"], tags=[Tag(begin="<f=a>", schema='{"type":"object"}', end="</f>")]
            ),
        ),
    ],
)
def test_each_field_sets_its_form(fields: dict[str, Any], body: Body | None) -> None:
    assert form(**fields) == body


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": OBJECT, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"jsno": OBJECT}}, "structured_outputs.jsno"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"structural_tag": ""}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"structural_tag": {}}},
            "structured_outputs.structural_tag.structures",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"grammar": {"type": "json", "value": {}}}, "grammar"),
        ({"guided_json": 1}, "guided_json"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"json_schema": "{"}, "json_schema"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, WHITESPACE),
        (asked_for({"strict": 1, "schema": OBJECT}), f"{AT}.strict"),
        (asked_for({"strict": True, "schema": OBJECT, "strickt": 1}), f"{AT}.strickt"),
        (asked_for({"strict": True, "schema": AGES}), f"{AT}.schema.properties.ages.items.minimun"),
        (asked_for({"schema": {"anyOf": [OBJECT, {"not": {}}]}}), f"{AT}.schema.anyOf[1].not"),
        (asked_for({"schema": {"$defs": {"a": {"if": {}}}}}), f"{AT}.schema.$defs.a.if"),
        ({"guided_json": {"uniqueItems": True}}, "guided_json.uniqueItems"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json.not"),
    ],
)
def test_an_invalid_form_is_refused_with_its_path(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        form(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        (asked_for({"schema": OBJECT, "name": "n", "description": "d", "strict": None}), []),
        (asked_for({"schema": OBJECT, "strickt": 1}), [f"{AT}.strickt"]),
        (asked_for({"schema": AGES}), [f"{AT}.schema.properties.ages.items.minimun"]),
        (asked_for({"schema": {"properties": {"a\n": {"nullable": 1}}}}), [f"{AT}.schema"]),
        ({"response_format": {"type": "json_object", "value": OBJECT}}, ["response_format.value"]),
        (
            {"guided_json": {"title": "t", "x-more": 1, "propertyOrder": []}},
            ["guided_json.propertyOrder"],
        ),
    ],
)
def test_a_schema_keyword_without_effect_is_listed_by_its_path(
    fields: dict[str, Any], ignored: list[str]
) -> None:
    found = answer_form(chat_body(**fields))
    assert found.ignored == ignored


def test_few_keywords_are_listed_and_their_paths_are_short() -> None:
    """A long name above many keywords must not be copied for each of them."""
    many = {f"k{n}": n for n in range(30_000)}
    found = answer_form(chat_body(guided_json={"properties": {"a" * 16_000: many}}))
    assert found.ignored == [f"guided_json.properties.{'a' * 99}.k{n}" for n in range(16)]
    found = answer_form(chat_body(**asked_for({"schema": OBJECT, **many})))
    assert len(found.ignored) == 16
    with pytest.raises(InvalidRequest) as caught:
        form(guided_json={"properties": {"a" * 1_000_000: {"not": {}}}})
    assert len(caught.value.message) < 500


LONG = "x" * (MAX_LITERAL_CHARS + 1)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"const": LONG}, ".const"),
        ({"const": {"a": [LONG]}}, ".const.a[0]"),
        ({"const": {LONG: 1}}, ".const"),
        ({"enum": ["a", LONG]}, ".enum[1]"),
        ({"pattern": LONG}, ".pattern"),
        ({"required": ["a", LONG]}, ".required[1]"),
        ({"properties": {LONG: {}}}, ".properties"),
        ({"patternProperties": {LONG: {}}}, ".patternProperties"),
        ({"properties": {"const": {"anyOf": [{}, {"const": LONG}]}}}, ".properties.const.anyOf[1]"),
        ({"$defs": {LONG: {"items": {"const": LONG}}}}, ".$defs.xxx"),
    ],
)
def test_a_long_literal_of_a_schema_is_refused_by_its_path(
    schema: dict[str, Any], path: str
) -> None:
    for body, at in (
        ({"guided_json": schema}, "guided_json"),
        (asked_for({"schema": schema}), "response_format.json_schema.schema"),
    ):
        with pytest.raises(InvalidRequest, match="the limit is 16,384") as caught:
            form(**body)
        assert caught.value.param is not None
        assert caught.value.param.startswith(at + path)
        assert len(caught.value.message) < 700


@pytest.mark.parametrize(
    "schema",
    [
        {"description": LONG, "title": LONG, "$comment": LONG, "default": LONG},
        {"properties": {"const": {"description": LONG}, "enum": {"examples": [LONG]}}},
        {"const": LONG[1:], "$defs": {"a": {"default": {"const": LONG[1:]}}}},
    ],
)
def test_texts_that_an_answer_never_has_to_contain_may_be_long(schema: dict[str, Any]) -> None:
    assert form(guided_json=schema) == JsonSchema(text=json.dumps(schema, separators=(",", ":")))


@pytest.mark.parametrize(
    ("body", "field", "problem"),
    [
        ({"guided_json": {"description": LONG * 33}}, "guided_json", "characters long"),
        ({"structured_outputs": {"regex": LONG * 900}}, "structured_outputs", "characters"),
        ({"guided_choice": ["a", LONG]}, "guided_choice", r"literal .* \(choices\[1\]\)"),
        ({"ebnf": LONG * 5}, "ebnf", "characters"),
    ],
)
def test_a_form_that_is_too_long_is_refused_before_it_travels_to_the_engine(
    body: dict[str, Any], field: str, problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem) as caught:
        form(**body)
    assert caught.value.param == field


@pytest.mark.parametrize("field", ["guided_whitespace_pattern", "grammar_lazy", "grammar_triggers"])
def test_options_that_would_change_the_grammar_are_refused(field: str) -> None:
    check_chat(chat_body(**{field: None}))
    with pytest.raises(InvalidRequest, match="not supported") as caught:
        check_chat(chat_body(**{field: [" "]}))
    assert caught.value.param == field


EXAMPLES: dict[str, Any] = {
    "type": "string",
    "enum": ["a"],
    "const": "a",
    "required": ["a"],
    "pattern": "a+",
    "format": "date",
    "$ref": "#/$defs/a",
    "dependentRequired": {"a": ["b"]},
    "dependencies": {"a": ["b"]},
    "$recursiveRef": "#",
    "$dynamicRef": "#a",
    "$dynamicAnchor": "a",
    "$id": "https://example.com/a",
    "id": "https://example.com/a",
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    **{key: {"a": {}} for key in ("properties", "patternProperties", "dependentSchemas", "$defs")},
    **{key: [{"type": "string"}] for key in ("allOf", "anyOf", "oneOf", "prefixItems")},
    **dict.fromkeys(("uniqueItems", "$recursiveAnchor", "deprecated", "readOnly"), True),
}


@pytest.mark.parametrize("keyword", sorted(ENFORCED | UNENFORCEABLE | SILENT))
def test_the_table_of_keywords_agrees_with_the_engine(keyword: str, compiler: Compiler) -> None:
    numeric = keyword.startswith(("min", "max", "exclusive", "multiple"))
    value = EXAMPLES.get(keyword, 1 if numeric else {})
    requests = {"$defs": {"a": {}}, keyword: value}
    grammar = Grammar(body=JsonSchema(text=json.dumps(requests)))
    if keyword in UNENFORCEABLE:
        with pytest.raises(InvalidRequest, match=re.escape(keyword)):
            compiler.compile(grammar)
    else:
        compiler.compile(grammar)


# ---- thinking before a form
@pytest.mark.parametrize(
    ("tail", "thinking"),
    [
        ("<assistant>", Thinking(opens="<think>", closes="</think>", optional=True)),
        ("<assistant><think>\n", Thinking(opens="<think>", closes="</think>", inside=True)),
        ("<assistant><think>\n\n</think>\n\n", None),
    ],
)
def test_a_form_starts_after_the_reasoning_that_the_prompt_allows(
    tail: str, thinking: Thinking | None
) -> None:
    assert READING.answer_start("<user>hi" + tail, {}, calls=False).thinking == thinking


# ---- tools
@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(CARD)


def tools(**fields: Any) -> tuple[AnswerStart, Body | None]:
    functions = [{"name": "weather", "parameters": WEATHER, "strict": True}, {"name": "now.utc"}]
    declared = [{"type": "function", "function": function} for function in functions]
    plan = tool_plan(chat_body(tools=declared, **fields))
    begun = READING.answer_start("<assistant>", {}, calls=plan.mode != "none")
    assert begun.bound is not None
    return begun, tool_grammar(begun.bound, plan)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def walked(compiler: Compiler, grammar: Grammar, rng: random.Random) -> list[int]:
    """Return the tokens of a random answer that the grammar admits. Tokens that end a string or an
    object, and special tokens, are preferred, so that the answer becomes complete."""
    matcher = compiler.compile(grammar).start()
    ids: list[int] = []
    while not matcher.is_complete and len(ids) < 500:
        allowed = sorted(possible(matcher, compiler.vocab_size))
        wanted = [i for i in allowed if i in END or i > 255]
        token = rng.choice(wanted if wanted and rng.random() < 0.5 else allowed)
        if token == EOS:
            break
        matcher.consume(token)
        assert matcher.error is None
        ids.append(token)
    return ids


def understood(ids: list[int], begun: AnswerStart) -> list[Event]:
    assert begun.bound is not None
    reader = ParserFactory(TOKENIZER, None, AnswerOptions(format=begun.bound)).new()
    return merged(reader.push(Output(request=1, tokens=ids, finish="stop")).events)


@pytest.mark.parametrize("seed", range(20))
def test_a_required_call_is_one_that_the_parser_understands(seed: int, compiler: Compiler) -> None:
    begun, body = tools(tool_choice="required", parallel_tool_calls=False)
    assert body is not None
    grammar = Grammar(body=body)
    call, arguments, end, _ = understood(walked(compiler, grammar, random.Random(seed)), begun)
    assert isinstance(call, ToolCall)
    assert isinstance(arguments, ToolArguments)
    assert isinstance(end, ToolCallEnd)
    assert call.name in ("weather", "now.utc")
    assert isinstance(json.loads(arguments.fragment), dict)


@pytest.mark.parametrize("seed", range(10))
def test_a_named_call_calls_this_tool_and_matches_its_schema(seed: int, compiler: Compiler) -> None:
    begun, body = tools(tool_choice=named("weather"))
    assert body is not None
    events = understood(walked(compiler, Grammar(body=body), random.Random(seed)), begun)
    names = [event.name for event in events if isinstance(event, ToolCall)]
    assert set(names) == {"weather"}
    for event in events:
        if isinstance(event, ToolArguments):
            arguments = json.loads(event.fragment)
            assert len(arguments["city"]) <= 5
            assert arguments.get("days", 1) in (1, 2)


@pytest.mark.parametrize(
    ("text", "is_possible"),
    [
        ("Just text.", True),
        ('<tool_call>\n{"name": "now.utc", "arguments": {"any": 1}}\n</tool_call>', True),
        ('Ok <tool_call>\n{"name": "weather", "arguments": {"city":"Rom"}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "weather", "arguments": {"town"', False),
        ('<tool_call>\n{"name": "other"', False),
    ],
)
def test_a_strict_tool_constrains_calls_and_nothing_else(
    text: str, is_possible: bool, compiler: Compiler
) -> None:
    _, body = tools(tool_choice="auto")
    assert body is not None
    matcher = compiler.compile(Grammar(body=body)).start()
    for token in marked_ids(text):
        if token not in possible(matcher, compiler.vocab_size):
            assert not is_possible
            return
        matcher.consume(token)
    assert is_possible
    assert EOS in possible(matcher, compiler.vocab_size)


def test_an_answer_without_demands_is_not_constrained() -> None:
    assert tools(tool_choice="none")[1] is None
    plain = {"type": "function", "function": {"name": "f", "parameters": WEATHER}}
    begun = READING.answer_start("<assistant>", {}, calls=True)
    assert begun.bound is not None
    assert tool_grammar(begun.bound, tool_plan(chat_body(tools=[plain]))) is None
