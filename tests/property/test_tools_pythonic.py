"""Calls as Python writes them: events do not depend on how the answer is cut."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.formats.argument_types import python_to_json
from gateway.formats.event_builder import DeclaredTool
from gateway.formats.events import (
    Content,
    Event,
    OutputWarning,
    ToolArguments,
    ToolCall,
    ToolCallEnd,
)
from gateway.formats.json_scanner import LiteralScan
from gateway.formats.json_spelling import json_number
from gateway.formats.literal_dialect import PYTHON
from gateway.formats.pythonic import FORMATS
from gateway.formats.reasoning import THINK
from gateway.formats.registry import Format
from tests.support.format_tools import arguments_of, parsed_events
from tests.support.formats import (
    JOINT,
    Call,
    Fixture,
    FormatRow,
    Sample,
    check,
    check_cuts,
    content,
    dumps,
    fixtures,
    lexicon,
    read,
    reasoning_writer,
)


def written(value: Any) -> str:
    return repr(value).replace("\\ue000", JOINT)


def one(call: Call) -> str:
    return f"{call.name}({', '.join(f'{k}={written(v)}' for k, v in call.arguments.items())})"


def listed(open: str = "", close: str = "") -> Callable[[Sequence[Call], int], str]:
    return lambda calls, before: f"{open}[{', '.join(map(one, calls))}]{close}"


def in_lines(calls: Sequence[Call], before: int) -> str:
    return "\n".join(["<function_calls>", *map(one, calls), "</function_calls>"])


def minicpm3(calls: Sequence[Call], before: int) -> str:
    def one(call: Call) -> str:
        return f"{call.name}({','.join(f'{k}={dumps(v)}' for k, v in call.arguments.items())})"

    return "\n".join(
        ["<|tool_call_start|>", "```python", *map(one, calls), "```", "<|tool_call_end|>"]
    )


def sample(name: str, write: Callable[[Sequence[Call], int], str], tag: str) -> Sample:
    syntax = FORMATS[name]
    return Sample(name, Format(syntax, THINK), write, think=reasoning_writer(THINK), tags=(tag,))


SAMPLES = [
    sample("pythonic", listed(), "']"),
    sample("llama4_pythonic", listed("<|python_start|>", "<|python_end|>"), "<|python_end|>"),
    sample("lfm2", listed("<|tool_call_start|>", "<|tool_call_end|>"), "<|tool_call_end|>"),
    sample("minicpm3", minicpm3, "<|tool_call_end|>"),
    sample("olmo3", in_lines, "</function_calls>"),
]
EACH = pytest.mark.parametrize("sample", SAMPLES, ids=[s.name for s in SAMPLES])


def cases(sample: Sample) -> list[Any]:
    """Return the answers that the sample can write. Without a marker, calls may only start an
    answer.
    """
    bare = sample.name == "pythonic"
    return [f for f in fixtures(sample) if not (bare and f.name in BEHIND_TEXT)]


BEHIND_TEXT = ("text before a call", "reasoning before")


def say(name: str, text: str, tools: Sequence[DeclaredTool] | None = None) -> list[Any]:
    return parsed_events(
        next(sample for sample in SAMPLES if sample.name == name), text, tools=tools
    )


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
    max_leaves=8,
)


@given(VALUES)
def test_every_literal_is_rewritten_as_the_json_of_its_value(value: Any) -> None:
    text = python_to_json(repr(value))
    if "inf" in repr(value):
        return
    assert text is not None
    assert json.loads(text) == json.loads(json.dumps(ast.literal_eval(repr(value))))


@given(VALUES, st.integers(min_value=1, max_value=7))
def test_a_literal_is_read_the_same_however_it_is_cut(value: Any, step: int) -> None:
    text, scan, told = repr(value) + ",", LiteralScan(), ""
    for at in range(0, len(text), step):
        position, status = scan.scan(text[at : at + step], PYTHON)
        if status == "end":
            assert text[at + position :] == ","
            break
    told = scan.drain()
    assert told == python_to_json(repr(value))


@pytest.mark.parametrize(
    ("literal", "meant"),
    [
        (r"'it\'s'", "it's"),
        ('"""a "quoted" word"""', 'a "quoted" word'),
        ("r'plain'", "plain"),
        (r"r'C:\new'", r"C:\new"),
        (r"""R"a\"b\d" """, r"""a\"b\d"""),
        (r"[rb'\n', '\n']", [r"\n", "\n"]),
        ("'a' 'b'", "ab"),
        ("('a'\n 'b', \"c\" 'd')", ["ab", "cd"]),
        ("{'a' 'b': '' 'c'}", {"ab": "c"}),
        ("'two\nlines'", "two\nlines"),
        (r"'\x41\u00e9\U0001f600\101\q'", "Aé😀A\\q"),
        (r"'\ud83d\ude00 \ud83d'", "😀 \\ud83d"),
        ("007", 7),
        ("+1_000.50", 1000.5),
        (".5", 0.5),
        ("0xff", 255),
        ("{'a': 1, 2: None,}", {"a": 1, "2": None}),
        ("(1, [True, ()],)", [1, [True, []]]),
        ("Color.RED", "Color.RED"),
        ("true", True),
    ],
)
def test_literals_that_models_write_are_understood(literal: str, meant: Any) -> None:
    text = python_to_json(literal)
    assert text is not None
    assert json.loads(text) == meant


@pytest.mark.parametrize(
    "literal", ["[1 2]", "'", "{'a'}", "[1,,2]", "{'a':}", "[", "'a", "{1: }", "1 2"]
)
def test_text_that_is_not_a_literal_is_rejected(literal: str) -> None:
    assert python_to_json(literal) is None


def test_numbers_are_written_as_json_writes_them() -> None:
    assert json_number("-00.50e+3") == "-0.50e+3"
    assert json_number("1.") == "1"
    assert json_number("12.0", whole=True) == "12"
    for text in ("", ".", "1e", "1.5.2", "abc", "--1", "1_"):
        assert json_number(text) is None
    assert json_number("1.5", whole=True) is None


def test_a_list_at_the_beginning_that_holds_no_call_is_content() -> None:
    for text in (
        "[1] is a source",
        "[see   below]",
        "[f ] x",
        "[",
        "[]",
        "[a.b.c, d]",
        "[f",
        "[f  ",
    ):
        events = say("pythonic", text)
        assert content(events) == text
        assert not any(isinstance(event, ToolCall) for event in events)
    assert say("pythonic", "Yes [f()]") == [Content("Yes [f()]")]


PROSE = (
    "[sorted(x) for x in [3, 1]] is a list comprehension",
    "[print(end='')] prints nothing",
    "[f2()]",
)


@pytest.mark.parametrize("name", ["pythonic", "llama4_pythonic"])
def test_a_list_without_a_marker_calls_only_tools_of_the_request(name: str) -> None:
    declared = [DeclaredTool("f")]
    for text in PROSE:
        events = say(name, text, declared)
        assert content(events) == text
        assert not any(isinstance(event, ToolCall) for event in events)
    call, *_ = say(name, "[f(x=1)]", declared)
    assert call == ToolCall(0, "id", "f")


@pytest.mark.parametrize("name", ["pythonic", "llama4_pythonic"])
@pytest.mark.parametrize(
    "text",
    [
        "[f(x) for x in y] is a list",
        "[f (1)]",
        "[f('a')]",
        "[f( x, y=1)]",
        "[f(x) is",
        "[f(",
        "[f(x",
    ],
)
def test_a_tool_without_named_arguments_in_brackets_is_content(name: str, text: str) -> None:
    s = next(sample for sample in SAMPLES if sample.name == name)
    s = replace(s, tools=(DeclaredTool("f"),))
    for deltas in ([text], list(text)):
        events = read(
            s, [[delta] for delta in deltas], lexicon(s, tokens=True), Fixture("", "", [])
        )
        assert content(events) == text
        assert not any(isinstance(event, ToolCall | ToolArguments) for event in events)


@pytest.mark.parametrize("name", ["pythonic", "llama4_pythonic"])
def test_prose_in_brackets_is_content_however_it_is_cut(name: str) -> None:
    s = next(sample for sample in SAMPLES if sample.name == name)
    s = replace(s, name=f"{name} (prose)", tools=(DeclaredTool("f"),))
    why = OutputWarning(
        "tool_parse_failed", "text that looks like a list of tool calls and is not one"
    )
    row = check(s, [Fixture(text[:9], text, before_the_parenthesis(text, why)) for text in PROSE])
    assert not row.differences, row.first


def before_the_parenthesis(text: str, why: OutputWarning) -> list[Event]:
    """Return the events of a text whose parenthesis shows that it is not a call. The warning
    precedes the parenthesis.
    """
    at = text.index("(")
    return [Content(text[:at]), why, Content(text[at:])]


def test_arguments_without_names_stay_unchanged_with_a_warning() -> None:
    events = say("lfm2", "<|tool_call_start|>[f(1, x=2)]<|tool_call_end|>")
    assert [type(event) for event in events] == [
        ToolCall,
        ToolArguments,
        OutputWarning,
        ToolCallEnd,
    ]
    assert events[1] == ToolArguments(0, "1, x=2)]")


def test_content_continues_after_the_calls() -> None:
    events = say("lfm2", "<|tool_call_start|>[f(x=2)]<|tool_call_end|>\nDone.")
    assert events[-1] == Content("Done.")
    assert arguments_of(events) == [{"x": 2}]


INNER_QUOTES = [
    ("text='sed -n '1,5p' f'", {"text": "sed -n '1,5p' f"}),
    (
        "code='python3 -c \"from a import b\nprint(b(3*x, sep='\\,'))\"'",
        {"code": "python3 -c \"from a import b\nprint(b(3*x, sep='\\,'))\""},
    ),
    (
        "a='it's', b='x' , c=['y', 'z'], d={'k': 'v'}",
        {
            "a": "it's",
            "b": "x",
            "c": ["y", "z"],
            "d": {"k": "v"},
        },
    ),
    ("a='echo ('a', 'b')', b=''", {"a": "echo ('a', 'b')", "b": ""}),
    ('a=\'x)\', b="say "hi""', {"a": "x)", "b": 'say "hi"'}),
    ("a=r'x 'y\\n' z', b=0", {"a": "x 'y\\n' z", "b": 0}),
    (r"a='it\'s \\', b=r'C:\new'", {"a": "it's \\", "b": r"C:\new"}),
    ('a="""b \'c\' "d" e"""', {"a": "b 'c' \"d\" e"}),
]


@pytest.mark.parametrize(("written", "meant"), INNER_QUOTES)
@pytest.mark.parametrize("ending", ["]", ", now()]", ""])
def test_quotes_in_a_string_of_lfm2_need_no_backslash(
    written: str, meant: dict[str, Any], ending: str
) -> None:
    s = next(sample for sample in SAMPLES if sample.name == "lfm2")
    text = f"<|tool_call_start|>[run({written}){ending}<|tool_call_end|>"
    events: list[Event] = [
        ToolCall(0, "call_1", "run"),
        ToolArguments(0, dumps(meant)),
        ToolCallEnd(0),
    ]
    if "now" in ending:
        events += [ToolCall(1, "call_2", "now"), ToolArguments(1, "{}"), ToolCallEnd(1)]
    row = FormatRow("lfm2 (inner quotes)")
    for tokens in (True, False):
        check_cuts(row, s, Fixture("quotes", text, events), lexicon(s, tokens=tokens))
    assert not row.differences, row.first
