"""Malformed JSON calls: no text is lost or invented, and there is a warning."""

from __future__ import annotations

import itertools

import pytest

from gateway.formats.event_builder import DeclaredTool
from gateway.formats.events import (
    Content,
    Event,
    OutputWarning,
    ToolArguments,
    ToolCall,
    ToolCallEnd,
    merged,
)
from gateway.formats.lexicon import Lexicon
from gateway.formats.registry import TOOLS, Format
from tests.support.formats import joined, units

UNREADABLE, INVALID = "tool_parse_failed", "invalid_tool_arguments"


def said(
    name: str,
    text: str,
    *,
    tools: list[DeclaredTool] | None = None,
    complete: bool = True,
    tokens: bool = False,
) -> list[Event]:
    """Return the events of a text. Checks that they are the same if it arrives at once or unit by
    unit."""
    format = Format(TOOLS[name])
    words = Lexicon(dict(enumerate(format.markers(), 1000)) if tokens else {})
    pieces = units(text, words)
    readings = []
    for deltas in ([joined(pieces)], [[piece] for piece in pieces]):
        ids = itertools.count()
        machine = format.parser(words, tools=tools, new_id=lambda ids=ids: f"id{next(ids)}")  # type: ignore[misc]
        events = [event for delta in deltas for piece in delta for event in machine.push(piece)]
        readings.append(merged(events + machine.finish(complete)))
    assert readings[0] == readings[1]
    return readings[0]


def call(arguments: str = "{}", name: str = "f", index: int = 0) -> list[Event]:
    return [
        ToolCall(index, f"id{index}", name),
        ToolArguments(index, arguments),
        ToolCallEnd(index),
    ]


def without_messages(events: list[Event]) -> list[Event]:
    return [OutputWarning(e.code, "") if isinstance(e, OutputWarning) else e for e in events]


def hermes(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


BODIES = {
    "hermes": '<tool_call>{"name": "f", "arguments": ARGUMENTS}</tool_call>',
    "jamba": '<tool_calls>[{"arguments": ARGUMENTS, "name": "f"}]</tool_calls>',
    "llama3_json": '{"name": "f", "parameters": ARGUMENTS}',
    "mistral": "[TOOL_CALLS]f[ARGS]ARGUMENTS",
    "deepseek_v31": (
        "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>f<\uff5ctool▁sep\uff5c>ARGUMENTS"
        "<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        "ARGUMENTS<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "openai": "<|channel|>commentary to=functions.f json<|message|>ARGUMENTS<|call|>",
    "k2_horizon": (
        '<ifm|tool_calls><ifm|tool_call>{"name": "f", "arguments": ARGUMENTS}</ifm|tool_call>'
        "</ifm|tool_calls>"
    ),
}
"""One format of each syntax whose arguments are JSON."""


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"id": 7, "name": "f", "arguments": {"a": [{}]}, "x": {"name": "g"}}', '{"a": [{}]}'),
        ('{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', '{"a": 1}'),
        ('{"function": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),  # its last brace is missing
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f"}', "{}"),
        ('{"arguments": null, "name": "f"}', "{}"),
        ('{"name": "f", "name": "g", "arguments": {}, "arguments": {"b": 1}}', "{}"),
        ('{ "name" :\n"f",\t"arguments":{ } , }', "{ }"),
        ('{"na\\u006de": "\\u0066", "arguments": {"\\"}": "\\\\"}}', '{"\\"}": "\\\\"}'),
        ('[{"name": "f", "arguments": {"a": "]"}}]', '{"a": "]"}'),
    ],
)
def test_a_call_is_found_however_its_object_is_written(body: str, arguments: str) -> None:
    assert said("hermes", hermes(body)) == call(arguments)


def test_half_a_character_in_a_name_is_replaced_so_that_the_name_can_be_sent() -> None:
    body = '{"name": "f\\ud83d", "arguments": {}}'
    assert said("hermes", hermes(body)) == call(name="f\ufffd")


def test_half_a_character_in_an_argument_is_kept_with_a_warning() -> None:
    arguments = '{"a": "\\ud83d"}'
    *begun, end = call(arguments)
    events = said("hermes", hermes(f'{{"name": "f", "arguments": {arguments}}}'))
    assert without_messages(events) == [*begun, OutputWarning(INVALID, ""), end]


MENDED = [
    ('{"a": "b\nc\td"}', r'{"a": "b\nc\td"}'),
    ('{"a": 1,}', '{"a": 1}'),
    (r'{"a": "\d+"}', r'{"a": "\\d+"}'),
    ('{"a": True, "b": [None]}', '{"a": true, "b": [null]}'),
]


@pytest.mark.parametrize(("written", "arguments"), MENDED)
@pytest.mark.parametrize("name", BODIES)
def test_arguments_that_can_only_be_meant_as_json_are_repaired(
    name: str, written: str, arguments: str
) -> None:
    events = said(name, BODIES[name].replace("ARGUMENTS", written))
    assert [e.fragment for e in events if isinstance(e, ToolArguments)] == [arguments]
    assert not [e for e in events if isinstance(e, OutputWarning)]
    assert isinstance(events[-1], ToolCallEnd)


def test_a_missing_last_brace_is_added_after_a_complete_value() -> None:
    assert said("hermes", hermes('{"name": "f", "arguments": {"a": 1')) == call('{"a": 1}')


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "f", "arguments": {a: 1}}', "{a: 1}"),
        ('{"name": "f", "arguments": {"a": NaN}}', '{"a": NaN}'),
        ('{"name": "f", "arguments": "x"}', '"x"'),
        ('{"name": "f", "arguments": [1, 2]}', "[1, 2]"),
        ('{"name": "f", "arguments": {"a": [1', '{"a": [1'),
        ('{"name": "f", "arguments": {"a": \'b\'}}', "{\"a\": 'b'}}"),
    ],
)
def test_arguments_that_are_not_json_have_a_warning(body: str, arguments: str) -> None:
    events = without_messages(said("hermes", hermes(body) + "\nok"))
    expected = call(arguments)
    assert events == [*expected[:2], OutputWarning(INVALID, ""), expected[2], Content("ok")]


@pytest.mark.parametrize(
    "body", ["{'name': 'f'}", '{"x": 1}', '{"name": 5}', "", '{"name": "f', "[]", "[ {} ]"]
)
def test_text_that_is_no_call_becomes_content_with_a_warning(body: str) -> None:
    for tokens in (True, False):
        events = without_messages(said("hermes", "a " + hermes(body), tokens=tokens))
        assert events == [Content("a " + hermes(body)), OutputWarning(UNREADABLE, "")]


def test_a_closing_token_in_a_string_is_text() -> None:
    body = '{"name": "f", "arguments": {"a": "</tool_call><tool_call>"}}'
    assert said("hermes", hermes(body), tokens=True) == call('{"a": "</tool_call><tool_call>"}')


def test_an_opening_marker_stands_in_for_a_forgotten_closing_one() -> None:
    text = '<tool_call>{"name": "f"}\n<tool_call>{"name": "g"}</tool_call>'
    for tokens in (True, False):
        assert said("hermes", text, tokens=tokens) == [*call(), *call(name="g", index=1)]


def test_text_after_a_call_in_its_tags_is_content() -> None:
    events = without_messages(said("hermes", hermes('{"name": "f"}}') + " b"))
    assert events == [*call(), OutputWarning(UNREADABLE, ""), Content("} b")]


def test_prose_about_a_marker_flows_on_at_once() -> None:
    machine = Format(TOOLS["hermes"]).parser(Lexicon())
    told = ""
    for at, char in enumerate("Use the <tool_call> tag, and <tool_call>s.", 1):
        told += "".join(e.text for e in machine.push(char) if isinstance(e, Content))
        assert at - len(told) <= len("<tool_call> ") + 1
    assert told == "Use the <tool_call> tag, and <tool_call>s."


def test_an_answer_that_ends_inside_a_call_has_no_end_of_it() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "b'
    begun: list[Event] = [ToolCall(0, "id0", "f"), ToolArguments(0, '{"a": "b')]
    assert without_messages(said("hermes", text)) == [*begun, OutputWarning(UNREADABLE, "")]
    assert said("hermes", text, complete=False) == begun
    assert said("hermes", 'a <tool_call>{"na', complete=False) == [Content("a ")]


def test_text_outside_markers_is_a_call_only_if_it_is_surely_one() -> None:
    for text in (
        '{"answer": 42, "name": "x"}',
        '{"name": "Bob", "age": 5} hi',
        '{"name": "f"}',
        " {not json} {",
        "{",
        '[{"name": "f", "arguments": {}}]',
        'So: {"name": "f", "parameters": {}}',
    ):
        assert said("llama3_json", text) == [Content(text)]
    assert said("llama3_json", '{"name": "f"}', tools=[DeclaredTool("f")]) == call()
    for text in ("[1] is a footnote", '```json\n{"a": 1}\n```', "[]"):
        assert said("xlam", text) == [Content(text)]


def test_calls_in_the_open_end_where_text_goes_on() -> None:
    text = '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}\nDone; {}'
    events = said("llama3_json", text)
    assert events == [*call(), *call(name="g", index=1), Content("Done; {}")]


def test_ordinary_words_that_are_also_markers_are_no_cause_for_a_warning() -> None:
    assert said("phi4_mini_json", "import functools[0]") == [Content("import functools[0]")]
    assert said("gigachat3", "a function call to f") == [Content("a function call to f")]


def test_each_key_of_an_object_of_names_is_a_call() -> None:
    text = '<|tools_prefix|>[{"f": {}, "g": {"a": 1}}]<|tools_suffix|>x'
    events = said("apertus", text)
    assert events == [*call(), *call('{"a": 1}', "g", 1), Content("x")]


def test_a_name_between_markers_may_lack_everything_else() -> None:
    kimi = "<|tool_calls_section_begin|><|tool_call_begin|>{}<|tool_calls_section_end|>x"
    assert said("kimi_k2", kimi.format("f<|tool_call_end|>")) == [*call(), Content("x")]
    bare = "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|> x"
    assert said("kimi_k2", bare) == [*call(), Content("x")]
    broken = kimi.format("functions.f:0<|tool_call_argument_begin|>{oops<|tool_call_end|>")
    events = without_messages(said("kimi_k2", broken))
    assert events == [
        ToolCall(0, "functions.f:0", "f"),
        ToolArguments(0, "{oops"),
        OutputWarning(INVALID, ""),
        ToolCallEnd(0),
        Content("x"),
    ]


def test_a_marker_with_no_name_after_it_is_content() -> None:
    text = "[TOOL_CALLS] is a marker"
    events = said("mistral", text)
    assert "".join(e.text for e in events if isinstance(e, Content)) == text
    assert [e.code for e in events if isinstance(e, OutputWarning)] == [UNREADABLE]
    assert said("mistral", '[TOOL_CALLS]f{"a": 1}')[1:] == call('{"a": 1}')[1:]


def test_calls_of_one_name_in_one_answer_have_their_own_ids() -> None:
    ids = [e.id for e in said("hermes", hermes('{"name": "f"}') * 3) if isinstance(e, ToolCall)]
    assert ids == ["id0", "id1", "id2"]
