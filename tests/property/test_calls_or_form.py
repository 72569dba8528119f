"""Answers that are either calls or JSON of a response format, for every tool format.

The grammar admits both, and the parser reads what it admits as one or the other.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.formats.call_parser import CallSyntax
from gateway.formats.event_builder import DeclaredTool
from gateway.formats.events import Content, Event, Finished, ToolCall
from gateway.formats.registry import TOOLS, Format
from gateway.formats.response_template import ResponseTemplate
from protocol.engine.grammar import Grammar, Json, JsonObject, JsonSchema, Rules
from tests.property.test_tool_grammars import (
    BOTH,
    EVERY,
    ODD,
    OTHERS,
    SYNTAXES,
    calls_in,
    each,
    model,
    speaker,
    thought,
)
from tests.support.format_tools import TYPED_TOOLS
from tests.support.formats import Fixture, Sample
from tests.support.tool_grammars import NESTED, Model, Walk, calls_of, fault
from tests.support.tool_grammars import TOOLS as DECLARED

FORM = Rules(start=Json("form"), schemas={"form": json.dumps(NESTED)})
SCHEMA = JsonSchema(text=json.dumps(NESTED))
BY_NAME = {declared.name: declared for declared in DECLARED}
SEEDS = range(2)


def around(spoken: Model, tools: Sequence[DeclaredTool], *, many: bool = True) -> dict[str, Any]:
    frame = spoken.bound.frame()
    calls = spoken.bound.required_calls_or_other(tools, many=many)
    return {"calls": calls, "before": frame.before, "after": frame.after}


def called(events: Sequence[Event]) -> bool:
    return any(isinstance(event, ToolCall) for event in events)


def said(events: Sequence[Event]) -> Any:
    """Return the text of an answer that is one text without warnings, as JSON."""
    text, end = events
    assert isinstance(text, Content), events
    assert isinstance(end, Finished), events
    return json.loads(text.text)


@EVERY
@BOTH
@pytest.mark.parametrize("seed", SEEDS)
def test_an_answer_is_calls_that_fit_or_of_the_form(name: str, tokens: bool, seed: int) -> None:
    spoken = model(name, tokens)
    ids = Walk(spoken, random.Random(seed))(FORM, **around(spoken, DECLARED))
    events = spoken.read([*spoken.ids(thought(name)), *ids], DECLARED, calls_or_text=True)
    if called(events):
        for call in calls_of(events):
            assert fault(call.arguments, BY_NAME[call.name].parameters or {}) is None
    else:
        assert fault(said(events), NESTED) is None


@each(without=ODD + OTHERS)
def test_what_templates_write_can_stand_instead_of_the_form(
    sample: Sample, cases: Sequence[Fixture]
) -> None:
    spoken = speaker(sample.name)
    beside = around(spoken, TYPED_TOOLS)
    texts = [case.text.strip("\n") for case in cases if case.name in calls_in(sample)]
    assert len(texts) >= 3
    assert [spoken.refused(SCHEMA, text, **beside) for text in texts] == [None] * len(texts)


def spelt_openers(name: str) -> str:
    """Return the openers of a call in this format, as text. Return "" for formats that write
    markers around content too.
    """
    match SYNTAXES[name]:
        case CallSyntax() as syntax:
            return " ".join(syntax.openers())
        case ResponseTemplate(frames_content=False, regions=regions):
            return " ".join(o.literal for r in regions if r.calls for o in r.open)
    return ""


@EVERY
@BOTH
@pytest.mark.parametrize("many", [True, False])
def test_the_form_is_read_as_content_whatever_it_talks_about(
    name: str, tokens: bool, many: bool
) -> None:
    spoken = model(name, tokens)
    beside = around(spoken, DECLARED, many=many)
    note = "" if tokens else spelt_openers(name)
    text = json.dumps({"where": {"n": 1}, "kind": 3, "note": note}, ensure_ascii=False)
    whole = beside["before"] + text + beside["after"]
    assert spoken.refused(SCHEMA, whole, **beside) is None
    ids = spoken.ids(thought(name) + whole)
    assert said(spoken.read(ids, DECLARED, calls_or_text=True)) == json.loads(text)
    assert spoken.refused(SCHEMA, "Just text.", **beside) is not None


# ---- formats whose calls begin like the form
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}
TREE = DeclaredTool(
    "plant",
    {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/Tree"}},
        "required": ["tree"],
        "additionalProperties": False,
        "$defs": {
            "Tree": {
                "type": "object",
                "properties": {"sub": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}},
                "additionalProperties": False,
            }
        },
    },
)
FIND = DeclaredTool("find", {"type": "object", "properties": {"q": {"type": "string"}}})
PEOPLE = {"type": "array", "items": PERSON}
ALIKE = [
    ("llama3_json", PERSON, '{"name": "find"}', '{"name": "find", "parameters": {"q": "a"}}'),
    ("llama3_json", PERSON, '{"name":"Ann","age":4}', '{"name":"find","parameters":{}}'),
    (
        "llama3_json",
        PERSON,
        '{ "name": "finder" }',
        '{"name": "plant", "parameters": {"tree": {"sub": [{}]}}}; '
        '{"name": "find", "parameters": {}}',
    ),
    ("xlam", PEOPLE, '[{"name": "finder"}]', '[{"name": "find", "arguments": {}}]'),
    ("xlam", PEOPLE, "[]", '[{"name": "plant", "arguments": {"tree": {}}}]'),
    ("pythonic", PEOPLE, '[{"name": "find"}]', '[find(q="a"), plant(tree={"sub": []})]'),
    ("pythonic", {"type": "array", "items": {"type": "integer"}}, "[1, 2]", "[find()]"),
]


@pytest.mark.parametrize(("name", "schema", "text", "call"), ALIKE)
def test_calls_and_a_form_with_the_same_start_are_distinguished(
    name: str, schema: dict[str, Any], text: str, call: str
) -> None:
    tools = [FIND, TREE]
    spoken = Model(Format(TOOLS[name]))
    body, beside = JsonSchema(text=json.dumps(schema)), around(spoken, tools)
    assert spoken.refused(body, text, **beside) is None
    assert spoken.refused(body, call, **beside) is None
    if text != '{"name": "find"}':
        assert said(spoken.read(spoken.ids(text), tools, calls_or_text=True)) == json.loads(text)
    assert calls_of(spoken.read(spoken.ids(call), tools, calls_or_text=True))
    wrong = call.replace("tree", "shrub").replace('"q": "a"', '"q": 1')
    if wrong != call:
        assert spoken.refused(body, wrong, **beside) is not None


def test_a_form_that_no_text_satisfies_is_refused_beside_calls_too() -> None:
    spoken = model("hermes", True)
    never = JsonSchema(text='{"enum": []}')
    calls = spoken.bound.required_calls_or_other(DECLARED, many=True)
    with pytest.raises(Exception, match="grammar") as caught:
        spoken.compiler.compile(Grammar(body=never, calls=calls))
    assert getattr(caught.value, "param", None) == "grammar"


def test_a_fault_of_the_calls_is_named_as_theirs() -> None:
    spoken = model("hermes", True)
    odd = DeclaredTool("odd", {"type": "object", "properties": {"x": {"not": {"type": "null"}}}})
    with pytest.raises(Exception, match="not") as caught:
        spoken.compiler.compile(
            Grammar(body=JsonObject(), calls=spoken.bound.required_calls_or_other([odd], many=True))
        )
    assert getattr(caught.value, "param", None) == "grammar.calls"
