"""Answers that are messages with headers: events do not depend on how the answer is cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.formats.events import (
    Content,
    Event,
    OutputWarning,
    Reasoning,
    ToolArguments,
    ToolCall,
    ToolCallEnd,
)
from gateway.formats.harmony import FORMATS
from gateway.formats.harmony_header import MAX_HEADER_CHARS
from gateway.formats.registry import Format
from tests.support.format_tools import TYPED_TOOLS, arguments_of, parsed_events, plain, tool
from tests.support.formats import (
    Call,
    ContentPart,
    Fixture,
    ReasoningPart,
    Sample,
    answers,
    check,
    content,
    difference,
    dumps,
    expected,
    lexicon,
    read,
    spelt,
    units,
    warned_about,
)

CALL = ToolCall(0, "id", "now")


def harmony(calls: Sequence[Call], before: int) -> str:
    return "".join(
        f"<|start|>assistant to=functions.{call.name}<|channel|>commentary <|constrain|>json"
        f"<|message|>{dumps(call.arguments)}<|call|>"
        for call in calls
    )


def harmony_says(text: str) -> str:
    return f"<|start|>assistant<|channel|>final<|message|>{text}<|end|>"


def harmony_thinks(text: str) -> str:
    return f"<|start|>assistant<|channel|>analysis<|message|>{text}<|end|>"


def muse(calls: Sequence[Call], before: int) -> str:
    def one(call: Call) -> str:
        body = "".join(
            f'<atem:parameter name="{key}">{plain(value)}</atem:parameter>\n'
            for key, value in call.arguments.items()
        )
        return f'<atem:invoke name="{call.name}">\n{body}</atem:invoke>\n'

    return (
        f"<|start|>assistant to={calls[0].name}<|message|><atem:function_calls>\n"
        f"{''.join(map(one, calls))}</atem:function_calls><|eom|>"
    )


def muse_says(text: str) -> str:
    return f"<|start|>assistant to=user<|message|>{text}<|eot|>"


def muse_thinks(text: str) -> str:
    return f"<|start|>assistant to=self<|message|>{text}<|eom|>"


def sample(name: str, write: Any, tags: tuple[str, ...], tools: Any = None) -> Sample:
    syntax = FORMATS[name]
    markers = (syntax.start, syntax.message, *syntax.ends, *syntax.in_header)
    return Sample(name, Format(syntax), write, markers=markers, tags=tags, tools=tools)


HARMONY = sample("openai", harmony, ("<|call|>", "<|end|>"))
MUSE = sample("muse_glimmer", muse, ("</atem:parameter>", "<|eom|>"), TYPED_TOOLS)
SAYS = {"openai": (harmony_says, harmony_thinks), "muse_glimmer": (muse_says, muse_thinks)}
SAMPLES = [HARMONY, MUSE]
EACH = pytest.mark.parametrize("sample", SAMPLES, ids=[s.name for s in SAMPLES])


def cases(sample: Sample) -> list[Fixture]:
    """Return the kit's answers as messages. The prompt has written the first
    `<|start|>assistant`.
    """
    found = []
    says, thinks = SAYS[sample.name]
    for name, parts in answers(sample.tags[0]):
        text, index = "", 0
        for part in parts:
            match part:
                case ContentPart(said):
                    text += says(said)
                case ReasoningPart(thought):
                    text += thinks(thought)
                case calls:
                    text += sample.write(calls, index)
                    index += len(calls)
        text = text.removeprefix("<|start|>assistant")
        warned = warned_about(sample) if "prose" in name else []
        found.append(Fixture(name, text, expected(sample, parts) + warned))
    return found


def say(sample: Sample, text: str, tools: Any = None, *, inside: bool = False) -> list[Any]:
    return parsed_events(sample, text, tools=tools, inside=inside)


SCRAPS = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
    *("assistant", "assist", "final", "analysis", "commentary", " to=functions.now", " to=now"),
    *(" to=x", " t", "json", " json", "{", "}", '{"a":1}', '"', "\\", " ", "\n", "Hello"),
)


@EACH
def test_what_any_scraps_of_messages_say_does_not_depend_on_the_cut(sample: Sample) -> None:
    rng = random.Random(13)
    declared = replace(sample, tools=(tool("now"),))
    for _ in range(1500):
        text = "".join(rng.choices(SCRAPS, k=rng.randint(2, 14)))
        text = rng.choice((f"{THOUGHT}<|end|>", "")) + text
        case = Fixture("scraps", text, [], rng.random() < 0.2, rng.random() < 0.7)
        for words in (lexicon(declared, tokens=True), lexicon(declared, tokens=False)):
            pieces = units(text, words)
            first, second = sorted(rng.choices(range(len(pieces) + 1), k=2))
            parts = [pieces[:first], pieces[first:second], pieces[second:]]
            whole = read(declared, [pieces], words, case)
            for deltas in (parts, [[piece] for piece in pieces]):
                said = read(declared, deltas, words, case)
                assert said == whole, difference(replace(case, events=whole), deltas, said)


THOUGHT = "<|channel|>analysis<|message|>hm"
FINAL = "<|channel|>final<|message|>Hello"
COMMENTARY = '<|channel|>commentary json<|message|>{"a":1}<|call|>'
MALFORMED = [
    ("neither end nor start", f"{THOUGHT}{FINAL}<|return|>"),
    ("a role alone", f"{THOUGHT}assistant{FINAL}<|return|>"),
    ("no start", f"{THOUGHT}<|end|>assistant{FINAL}<|return|>"),
    ("no start and no role", f"{THOUGHT}<|end|>{FINAL}"),
    ("no end", f"{THOUGHT}<|start|>assistant{FINAL}<|end|>"),
    ("neither start nor channel", f"{THOUGHT}<|end|>assistantfinal<|message|>Hello<|return|>"),
    ("no channel", f"{THOUGHT}<|end|><|start|>assistantfinal<|message|>Hello<|return|>"),
    ("a blank before the channel", f"{THOUGHT}<|end|>\nassistant final <|message|>Hello<|return|>"),
]
BARE_CALLS = [
    ("no message", 'assistantcommentary to=functions.now json{"a":1}<|call|>'),
    ("no type", 'assistantcommentary to=functions.now{"a":1}<|call|>'),
    ("no prefix", 'assistantcommentary to=now json {"a":1}<|call|>'),
    ("no call", 'assistantcommentary to=functions.now json{"a":1}'),
    ("no constrain", 'assistantcommentary to=functions.now json<|message|>{"a":1}<|call|>'),
    ("message alone", 'assistantcommentary to=functions.now<|message|>{"a":1}<|call|>'),
    ("constrain", 'assistantcommentary to=functions.now <|constrain|>json{"a":1}<|call|>'),
    ("a role", 'assistant to=functions.now json{"a":1}<|call|>'),
    ("a start", '<|start|>assistantcommentary to=functions.now json{"a":1}<|call|>'),
    ("a channel", '<|channel|>commentary to=functions.now json{"a":1}<|call|>'),
]
"""(the marker that is missing or present, a call after the end of a message)."""
NO_HEADERS = [
    "assistantfinal",
    "assistantfinal answer: {}",
    "assistantfinality",
    "assistantcommentary to be",
    "assistantcommentary {}",
    'assistantcommentary to=functions.other json{"a":1}',
    'assistantcommentary to=user json{"a":1}',
    "assistants {final}",
    "assistant final",
    "assistant to=functions.now, or",
    "to=functions.now {",
    "assistants assistant",
]
"""Texts that start like a header without markers, but are not headers."""


def malformed() -> list[Fixture]:
    said: list[Event] = [Reasoning("hm"), Content("Hello")]
    prose = "an assistant to the user, assistants <|channel|> of, <|message|> assistant"
    called = expected(HARMONY, [ReasoningPart("hm"), [Call("now", {"a": 1})]])
    called = [
        ToolArguments(0, '{"a":1}') if isinstance(event, ToolArguments) else event
        for event in called
    ]
    return [
        *(Fixture(name, text, said) for name, text in MALFORMED),
        Fixture("a call", f"{THOUGHT}assistant to=functions.now{COMMENTARY}", called),
        Fixture("between", f"{THOUGHT}<|end|>assistant to=functions.now{COMMENTARY}", called),
        Fixture(
            "thoughts without a channel",
            f"{THOUGHT}<|end|>assistantanalysis<|message|>so<|end|>{FINAL}",
            [Reasoning("hm\nso"), Content("Hello")],
        ),
        Fixture("markers in thoughts", f"{THOUGHT} {prose}", [Reasoning(f"hm {prose}")]),
        Fixture(
            "a channel at the end of thoughts",
            f"{THOUGHT}<|channel|> so<|end|><|start|>assistant{FINAL}",
            [Reasoning("hm<|channel|> so"), Content("Hello")],
        ),
    ]


def bare_calls() -> list[Fixture]:
    """Return answers to a request that declares one tool: calls, and texts that are not calls."""
    arguments: list[Event] = [ToolArguments(0, '{"a":1}'), ToolCallEnd(0)]
    called: list[Event] = [Reasoning("hm"), ToolCall(0, "call_1", "now"), *arguments]
    again: list[Event] = [ToolCall(1, "call_2", "now"), ToolArguments(1, "{}"), ToolCallEnd(1)]
    header = "assistantcommentary to=functions.now json"
    longest = header.ljust(MAX_HEADER_CHARS)
    return [
        *(Fixture(name, f"{THOUGHT}<|end|>{text}", called) for name, text in BARE_CALLS),
        Fixture("the longest header", f'{THOUGHT}<|end|>{longest}{{"a":1}}', called),
        Fixture(
            "a header that is too long",
            f'{THOUGHT}<|end|>{longest} {{"a":1}}',
            [Reasoning("hm"), Content(f'{longest} {{"a":1}}')],
        ),
        Fixture(
            "two calls",
            f'{THOUGHT}<|end|>{header}{{"a":1}}<|call|>{header}{{}}<|call|>',
            called + again,
        ),
        Fixture(
            "prose in a string",
            f'{THOUGHT}<|end|>{header}{{"a":"{spelt("<|end|>")}{header}{{"}}<|call|>',
            [*called[:2], ToolArguments(0, f'{{"a":"<|end|>{header}{{"}}'), ToolCallEnd(0)],
        ),
        *(
            Fixture(text, f"{THOUGHT}<|end|>{text}", [Reasoning("hm"), Content(text)])
            for text in NO_HEADERS
        ),
        Fixture(
            "in the middle of an answer",
            f'{THOUGHT}<|end|>{FINAL} assistantfinal {header}{{"a":1}}<|return|>',
            [Reasoning("hm"), Content(f'Hello assistantfinal {header}{{"a":1}}')],
        ),
        Fixture(
            "in the middle of thoughts",
            f'{THOUGHT} {header}{{"a":1}} assistantfinal x<|end|>{FINAL}',
            [Reasoning(f'hm {header}{{"a":1}} assistantfinal x'), Content("Hello")],
        ),
    ]


def test_calls_without_markers_and_texts_like_them_read_the_same_however_they_are_cut() -> None:
    tools = (tool("now"),)
    row = check(replace(HARMONY, name="openai (bare calls)", tools=tools), bare_calls())
    assert not row.differences, row.first


def test_markers_that_are_missing_between_messages_change_nothing_however_it_is_cut() -> None:
    cases = [f for f in malformed() if f.name != "a channel at the end of thoughts"]
    row = check(replace(HARMONY, name="openai (malformed)"), cases)
    assert not row.differences, row.first
    tokens = replace(HARMONY, name="openai (malformed, tokens)", spelt_ok=False)
    row = check(tokens, malformed())
    assert not row.differences, row.first


@pytest.mark.parametrize(("name", "text"), BARE_CALLS)
def test_a_call_without_markers_names_a_declared_function(name: str, text: str) -> None:
    arguments = [ToolArguments(0, '{"a":1}'), ToolCallEnd(0)]
    assert say(HARMONY, f"{FINAL}<|end|>{text}", (tool("now"),)) == [
        Content("Hello"),
        CALL,
        *arguments,
    ]


@pytest.mark.parametrize("text", NO_HEADERS)
def test_text_that_begins_like_a_header_is_content(text: str) -> None:
    said = say(HARMONY, f"{THOUGHT}<|end|>{text}", (tool("now"),))
    assert said == [Reasoning("hm"), Content(text)]


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_the_answer_is_content_though_markers_between_messages_are_missing(
    name: str, text: str
) -> None:
    assert say(HARMONY, text) == [Reasoning("hm"), Content("Hello")]


def test_a_recipient_without_a_start_begins_a_message_of_muse_too() -> None:
    for text in (
        " to=self<|message|>hm<|eom|>assistant to=user<|message|>Hi<|eot|>",
        " to=self<|message|>hmassistant to=user<|message|>Hi<|eot|>",
    ):
        assert say(MUSE, text) == [Reasoning("hm"), Content("Hi")]


def test_only_what_may_be_a_role_is_held_back() -> None:
    machine = HARMONY.format.parser(lexicon(HARMONY, tokens=True), starts_inside=True)
    assert machine.push("An assist") == [Reasoning("An ")]
    assert machine.push("ed") == [Reasoning("assisted")]
    assert machine.push(" assistant to") == [Reasoning(" ")]
    assert machine.push(" be") == [Reasoning("assistant to be")]
    assert machine.push(" an assistant") == [Reasoning(" an ")]
    assert machine.finish() == [Reasoning("assistant")]


def test_an_answer_without_a_header_is_content() -> None:
    for text in ("Hello <b>", "to be or not", " assistance", "t", " to="):
        assert content(say(HARMONY, text)) == text


def test_messages_of_one_kind_are_joined_with_a_line_break() -> None:
    thoughts = harmony_thinks("One.") + harmony_thinks("") + harmony_thinks("Two.")
    said = harmony_says("a").replace("final", "commentary") + harmony_says("b")
    events = say(HARMONY, thoughts + said)
    assert events == [Reasoning("One.\nTwo."), Content("a\nb")]


def test_a_prompt_that_opens_the_reasoning_is_gone_on_with() -> None:
    assert say(HARMONY, "Hm.<|end|>" + harmony_says("Yes"), inside=True) == [
        Reasoning("Hm."),
        Content("Yes"),
    ]


def test_the_recipient_may_follow_the_channel() -> None:
    text = '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a":1}'
    assert say(HARMONY, text) == [CALL, ToolArguments(0, '{"a":1}'), ToolCallEnd(0)]


def test_a_tool_the_request_does_not_have_is_reasoning_unless_it_is_a_function() -> None:
    python = "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
    assert say(HARMONY, python, (tool("now"),)) == [Reasoning("print(1)")]
    call = "<|channel|>commentary to=functions.x json<|message|>{}<|call|>"
    assert [type(e) for e in say(HARMONY, call, (tool("now"),))] == [
        ToolCall,
        OutputWarning,
        ToolArguments,
        ToolCallEnd,
    ]


def test_a_call_without_arguments_has_an_empty_object() -> None:
    text = "<|channel|>commentary to=functions.now<|message|><|call|>"
    assert say(HARMONY, text) == [CALL, ToolArguments(0, "{}"), ToolCallEnd(0)]


def test_a_last_call_that_is_no_object_is_not_complete() -> None:
    text = '<|channel|>commentary to=functions.now<|message|>{"a": '
    assert [type(event) for event in say(HARMONY, text)] == [ToolCall, ToolArguments, OutputWarning]


def test_a_call_in_a_message_to_oneself_is_text_and_to_the_user_has_a_warning_too() -> None:
    call = '<atem:function_calls><atem:invoke name="now"></atem:invoke></atem:function_calls>'
    assert say(MUSE, f" to=self<|message|>{call}<|eom|>") == [Reasoning(call)]
    text, warned = say(MUSE, f" to=user<|message|>{call}<|eot|>")
    assert text == Content(call)
    assert isinstance(warned, OutputWarning)


def test_a_doubled_name_means_the_tool() -> None:
    text = muse([Call("now.now")], 0).removeprefix("<|start|>assistant")
    assert say(MUSE, text, (tool("now"),))[0] == CALL


def test_text_for_a_tool_that_is_no_call_is_content_with_a_warning() -> None:
    events = say(MUSE, " to=now<|message|>oops, no call<|eom|>")
    assert content(events) == "oops, no call"
    assert [type(event) for event in events] == [OutputWarning, Content]
    assert arguments_of(events) == []
