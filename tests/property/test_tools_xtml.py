"""Kimi K3's answers: events do not depend on how they are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gateway.formats.events import Content, Reasoning, ToolCall, ToolCallEnd
from gateway.formats.registry import Format
from gateway.formats.xtml import FORMATS
from tests.support.format_tools import arguments_of, parsed_events, plain
from tests.support.formats import (
    Call,
    ContentPart,
    Fixture,
    ReasoningPart,
    Sample,
    answers,
    content,
    expected,
)

TYPES = {str: "string", int: "number", float: "number", dict: "object", list: "array"}


def element(name: str, body: str, attributes: str = "") -> str:
    return f"<|open|>{name}{attributes}<|sep|>{body}<|close|>{name}<|sep|>"


def tools(calls: Sequence[Call], before: int) -> str:
    def one(index: int, call: Call) -> str:
        body = "".join(
            element("argument", plain(value), f' key="{key}" type="{TYPES[type(value)]}"')
            for key, value in call.arguments.items()
        )
        return element("call", body, f' tool="{call.name}" index="{index}"')

    return element("tools", "".join(one(i, call) for i, call in enumerate(calls, 1)))


K3 = Sample(
    "kimi_k3",
    Format(FORMATS["kimi_k3"]),
    tools,
    tags=("<|close|>call<|sep|>", "<|close|>argument<|sep|>"),
)


def cases() -> list[Fixture]:
    """Return the kit's answers in channels. The prompt has opened the first channel."""
    found = []
    for name, parts in answers(K3.tags[0]):
        text, index = "", 0
        for part in parts:
            match part:
                case ContentPart(said):
                    text += element("response", said)
                case ReasoningPart(thought):
                    text += element("think", thought)
                case calls:
                    text += tools(calls, index)
                    index += len(calls)
        text += "<|close|>message<|sep|>"
        inside = text.startswith("<|open|>think<|sep|>")
        text = text.removeprefix("<|open|>think<|sep|>").removeprefix("<|open|>response<|sep|>")
        found.append(Fixture(name, text, expected(K3, parts), starts_inside=inside))
    return found


def say(text: str, *, inside: bool = False, tokens: bool = True) -> list[Any]:
    return parsed_events(K3, text, inside=inside, tokens=tokens)


def argument(value: str, type_: str, key: str = "k") -> str:
    body = element("argument", value, f' key="{key}" type="{type_}"')
    return element("tools", element("call", body, ' tool="f" index="1"'))


@pytest.mark.parametrize(
    ("value", "type_", "meant"),
    [
        ("42", "string", "42"),
        ("42", "number", 42),
        (' {"a": [1]}', "object", {"a": [1]}),
        ("null", "null", None),
        ("{oops", "object", "{oops"),
        ("a<|close|>call<|sep|>b<|open|>argument<|sep|>", "string", None),
    ],
)
def test_a_value_has_the_type_in_its_tag(value: str, type_: str, meant: Any) -> None:
    events = say(argument(value, type_), tokens=False)
    assert arguments_of(events) == [{"k": value if "<" in value else meant}]


def test_attributes_are_unescaped() -> None:
    assert arguments_of(say(argument("1", "number", "a&quot;&amp;quot;"))) == [{'a"&quot;': 1}]


def test_a_channel_that_opens_ends_the_one_before() -> None:
    events = say("Hm.<|open|>response<|sep|>Yes" + argument("1", "number"), inside=True)
    assert events[:3] == [Reasoning("Hm."), Content("Yes"), ToolCall(0, "id", "f")]
    assert events[-1] == ToolCallEnd(0)


def test_a_tag_that_means_nothing_here_is_text() -> None:
    for text in ("a<|open|>b<|sep|>c", "<|close|>think<|sep|>", "<|open|>call<|sep|>", "<|open|>x"):
        assert content(say(text, tokens=False)) == text
