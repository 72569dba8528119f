"""Functionary's messages: events do not depend on how the answer is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gateway.formats.events import Content, OutputWarning, ToolArguments, ToolCall, ToolCallEnd
from gateway.formats.functionary import EVERYONE, FORMATS, Functionary
from gateway.formats.registry import Format
from tests.support.format_tools import TYPED_TOOLS, parsed_events
from tests.support.formats import (
    Call,
    ContentPart,
    Fixture,
    ReasoningPart,
    Sample,
    answers,
    dumps,
    expected,
)


def writer(x: Functionary) -> Callable[[Sequence[Call], int], str]:
    return lambda calls, before: "".join(
        f"{x.line}{x.next}{call.name}{x.name_end}{dumps(call.arguments)}" for call in calls
    )


SAMPLES = [
    Sample(
        "functionary_v22",
        Format(FORMATS["functionary_v22"]),
        writer(FORMATS["functionary_v22"]),
        markers=(),
        parts=("<|from|>", "<|recipient|>", "<|content|>"),
        tags=(FORMATS["functionary_v22"].next,),
        tools=TYPED_TOOLS,
    ),
    Sample(
        "functionary_v32",
        Format(FORMATS["functionary_v32"]),
        writer(FORMATS["functionary_v32"]),
        markers=(),
        tags=(">>>",),
        tools=TYPED_TOOLS,
    ),
]
V32 = SAMPLES[1]


def cases(sample: Sample) -> list[Fixture]:
    """Return the kit's answers as messages. The prompt has written the first `next`."""
    x = FORMATS[sample.name]
    found = []
    for name, parts in answers(sample.tags[0]):
        if "prose" in name or any(isinstance(part, ReasoningPart) for part in parts):
            continue
        text = ""
        for part in parts:
            if isinstance(part, ContentPart):
                text += f"{x.next}{EVERYONE}{x.name_end}{part.text}"
            else:
                text += sample.write(part, 0)  # type: ignore[arg-type]
        text = text.removeprefix(x.line).removeprefix(x.next)
        found.append(Fixture(name, text, expected(sample, parts)))
    found.append(
        Fixture(
            "two messages",
            f"{EVERYONE}{x.name_end}a{x.next}{EVERYONE}{x.name_end}b",
            [Content("a\nb")],
        )
    )
    return found


def said(text: str) -> list[Any]:
    return parsed_events(V32, text, tools=TYPED_TOOLS)


@pytest.mark.parametrize(
    "text", ["Hello.", "Hello\nyou", "a\n\nb", "if x:\n    >>> y\n", "x" * 300 + "\n", "now"]
)
def test_text_without_a_recipient_is_content(text: str) -> None:
    assert [event for event in said(text) if not isinstance(event, OutputWarning)] == [
        Content(text)
    ]


def test_prompts_of_an_interpreter_in_the_answer_are_content_with_a_warning() -> None:
    events = said("all\nType:\n>>> x = 1\n>>> print(x)")
    assert [type(event) for event in events] == [Content, OutputWarning]
    assert events[0] == Content("Type:\n>>> x = 1\n>>> print(x)")


def test_an_object_after_an_unknown_name_is_a_call_with_a_warning() -> None:
    events = said('other\n{"a": 1}')
    assert [type(event) for event in events] == [
        ToolCall,
        OutputWarning,
        ToolArguments,
        ToolCallEnd,
    ]


def test_arguments_that_are_not_an_object_stay_unchanged_with_a_warning() -> None:
    events = said("run\nprint(1)>>>now\n{}")
    assert events[1] == ToolArguments(0, "print(1)")
    assert [type(event) for event in events[2:4]] == [OutputWarning, ToolCallEnd]
    assert events[4] == ToolCall(1, "id", "now")
