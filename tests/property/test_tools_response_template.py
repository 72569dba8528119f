"""Formats that checkpoints describe themselves: events do not depend on how the answer is cut."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.formats.lexicon import Lexicon
from gateway.formats.registry import Format
from gateway.formats.response_template_loader import closings, load, openings
from gateway.formats.response_template_regions import RegionOpening
from gateway.formats.xml_parameters import XmlParameters
from tests.property.test_tools_gemma import literal
from tests.support.format_tools import TYPED_TOOLS, parsed_events, plain
from tests.support.formats import (
    Call,
    ContentPart,
    Fixture,
    ReasoningPart,
    Sample,
    answers,
    content,
    dumps,
    expected,
)
from tests.support.response_templates import SMOLLM, TEMPLATES


@dataclass(frozen=True)
class Written:
    """How the model of a template writes. `tags` and `parts` are as in Sample.

    between   texts before, between and after the calls of a group
    """

    call: Callable[[Call], str]
    says: Callable[[str], str]
    thinks: Callable[[str], str]
    tags: tuple[str, ...]
    between: tuple[str, str, str] = ("", "\n", "")
    parts: tuple[str, ...] = ()


def hermes(call: Call) -> str:
    body = dumps({"name": call.name, "arguments": call.arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def qwen(call: Call) -> str:
    body = "".join(
        f"<parameter={key}>\n{plain(value)}\n</parameter>\n"
        for key, value in call.arguments.items()
    )
    return f"<tool_call>\n<function={call.name}>\n{body}</function>\n</tool_call>"


def harmony(call: Call) -> str:
    head = f"<|start|>assistant<|channel|>commentary to=functions.{call.name} <|constrain|>json"
    return f"{head}<|message|>{dumps(call.arguments)}<|call|>"


def cohere(call: Call) -> str:
    return dumps({"tool_call_id": "0", "tool_name": call.name, "parameters": call.arguments})


def gemma(call: Call) -> str:
    return f"<|tool_call>call:{call.name}{literal(call.arguments, QUOTE)}<tool_call|>"


def muse(call: Call) -> str:
    body = "".join(
        f'<atem:parameter name="{key}">{plain(value)}</atem:parameter>\n'
        for key, value in call.arguments.items()
    )
    return f'<atem:invoke name="{call.name}">\n{body}</atem:invoke>'


def think(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


def itself(text: str) -> str:
    return text


def around(before: str, after: str) -> Callable[[str], str]:
    return lambda text: before + text + after


QUOTE = '<|"|>'
ASSISTANT = "<|start|>assistant"
FINAL = around(f"{ASSISTANT}<|channel|>final<|message|>", "<|end|>")
ANALYSIS = around(f"{ASSISTANT}<|channel|>analysis<|message|>", "<|end|>")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>")
ACTION = ("<|START_ACTION|>[", ", ", "]<|END_ACTION|>")
WRITTEN = {
    "smollm": Written(hermes, itself, think, ("</tool_call>",)),
    "qwen3": Written(qwen, itself, think, ("</tool_call>",)),
    "gpt_oss": Written(harmony, FINAL, ANALYSIS, ("<|call|>", "<|end|>"), parts=HARMONY),
    "cohere": Written(
        cohere,
        around("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        around("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|END_ACTION|>",),
        ACTION,
    ),
    "ernie": Written(hermes, around("<response>\n", "\n</response>\n"), think, ("</tool_call>",)),
    "gemma4": Written(
        gemma,
        itself,
        around("<|channel>thought\n", "<channel|>"),
        ("<tool_call|>",),
        parts=("<|channel>", "<|tool_call>"),
    ),
    "muse": Written(
        muse,
        around("to=user<|message|>", "<|eot|>"),
        around("to=self<|message|>", "<|eom|>"),
        ("<atem:function_calls>",),
        parts=("<|message|>",),
    ),
}


def sample(name: str) -> Sample:
    written = WRITTEN[name]
    before, joint, after = written.between
    syntax = load(TEMPLATES[name])
    closes = [literal for region in syntax.regions for literal in region.close]
    calls = [region.calls for region in syntax.regions]
    trims = any(isinstance(one, XmlParameters) and one.trim == "blanks" for one in calls)
    return Sample(
        name,
        Format(syntax),
        lambda calls, index: before + joint.join(map(written.call, calls)) + after,
        markers=(*(literal for literal in closes if "|" in literal), "<tool_call>", "</tool_call>"),
        parts=written.parts,
        tags=written.tags,
        trims=trims,
        tools=TYPED_TOOLS,
    )


SAMPLES = [sample(name) for name in TEMPLATES]
EACH = pytest.mark.parametrize("sample", SAMPLES, ids=[s.name for s in SAMPLES])


def cases(sample: Sample) -> list[Fixture]:
    found = []
    how = WRITTEN[sample.name]
    for name, parts in answers(sample.tags[0]):
        if sample.trims and name == "newlines around a string":
            continue
        text, index = "", 0
        for part in parts:
            match part:
                case ContentPart(said):
                    text += how.says(said)
                case ReasoningPart(thought):
                    text += how.thinks(thought)
                case calls:
                    text += sample.write(calls, index)
                    index += len(calls)
        if sample.name == "ernie":  # the prompt has opened the thinking
            text = text.removeprefix("<think>") if text.startswith("<think>") else "</think>" + text
        found.append(Fixture(name, text, expected(sample, parts)))
    return found


def say(name: str, text: str, *, inside: bool = False) -> list[Any]:
    return parsed_events(sample(name), text, tools=TYPED_TOOLS, inside=inside, tokens=False)


def test_text_that_only_starts_like_an_opening_is_outside_text() -> None:
    text = "a <tool_call>\n<b> c"
    assert content(say("qwen3", text)) == text
    assert content(say("qwen3", "<tool_call>" + " " * 300 + "x")) == "<tool_call>" + " " * 300 + "x"


@pytest.mark.parametrize(
    ("pattern", "opening"),
    [
        (r"to=self<\|message\|>", RegionOpening("to=self<|message|>")),
        (r"(?:^|<think>\s*)", RegionOpening(at_start=True)),
        (r"<tool>(?P<n>\w+)", RegionOpening("<tool>", r"<tool>(?P<n>\w+)", "", r"\w")),
        (r"<a>\s*<b=(?P<n>\w+)>", RegionOpening("<a>", r"<a>\s*<b=(?P<n>\w+)>", ">")),
    ],
)
def test_a_pattern_is_a_literal_and_the_text_after_it(pattern: str, opening: RegionOpening) -> None:
    assert openings(pattern)[0] == opening


@pytest.mark.parametrize(
    "pattern", [r"\w+<a>", r"(a|b)<c>", r"a(?=b)", r"a{2}", r"a.*", r"(a+)+b", r"x*", "(?:)"]
)
def test_a_pattern_that_is_not_understood_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        openings(pattern)


def test_a_closing_pattern_is_one_of_several_literals() -> None:
    assert closings(r"(?:<\|END\|>|$)") == ("<|END|>",)
    assert closings(r"\n?</response>") == ("</response>",)
    with pytest.raises(ValueError, match="more than a literal"):
        closings(r"</a\w+>")


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("version",), 2, "version"),
        (("surprise",), 1, "unknown keys"),
        (("fields", "content", "surprise"), 1, "unknown keys"),
        (("fields", "summary"), {"open": "<s>"}, "only"),
        (("fields", "thinking", "content"), "json", "only text"),
        (("fields", "thinking", "open"), "<tool_call>", "same literal"),
        (("fields", "tool_calls", "content"), "kv-lines", "not supported"),
        (("fields", "tool_calls", "transform"), "{content}", "name and the arguments"),
        (
            ("fields", "tool_calls", "transform"),
            {"name": "{n}", "arguments": "{content}"},
            "captures",
        ),
        (("fields", "tool_calls", "open_pattern"), r"\w<a>", "cannot both be set"),
        (("fields", "tool_calls", "open"), [], "supported|list of strings|opening"),
    ],
)
def test_what_is_not_understood_is_refused_with_the_fields_name(
    path: tuple[str, ...], value: Any, complaint: str
) -> None:
    template = copy.deepcopy(SMOLLM)
    at: Any = template
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(ValueError, match=complaint):
        load(template)


ODD: tuple[Any, ...] = (None, 1, "", "x", "(", [], {}, [1], [[]], [[""]], {"a": 1}, "{a}")


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every value in a template."""
    if at:
        yield at
    inner = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list) else inner:
        yield from places(item, (*at, key))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_damaged_template_is_read_or_refused_and_never_fails_later(name: str) -> None:
    for path, odd in itertools.product(places(TEMPLATES[name]), ODD):
        template = copy.deepcopy(TEMPLATES[name])
        at: Any = template
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = odd
        try:
            machine = Format(load(template)).parser(Lexicon())
        except ValueError:
            continue
        machine.push("<think>a</think><tool_call>{}</tool_call>x<|start|>to=self<|message|>")
        machine.finish()
