"""A custom tool's grammar holds for the text of its calls, in every tool format.

Python's own Lark parses the texts. It is the reference for `gateway.formats.lark_pattern`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import lark
import pytest

from engine_core.grammar.markers import is_marker
from gateway.api.openai.requests import ChatBody
from gateway.api.openai.tools import ToolPlan, tool_grammar, tool_plan
from gateway.formats.events import Event, Finished, ToolCall, ToolCallEnd, ToolText
from gateway.formats.registry import TOOLS, Format
from tests.support.custom_tools import ARITHMETIC, JSON, PATCH, custom_tool
from tests.support.examples import examples
from tests.support.tool_grammars import Model, Walk

WALKS = [(tokens, seed) for seed in range(examples(1, 40)) for tokens in (True, False)]
"""(whether markers are tokens, seed of a random walk)."""
EVERY = pytest.mark.parametrize("name", TOOLS)
GRAMMARS: Mapping[str, str] = {"patch": PATCH, "sum": ARITHMETIC, "value": JSON}
PARSERS = {
    name: lark.Lark(source.replace("/(.*)/", "/(.+)/?"))  # Lark refuses terminals without text
    for name, source in GRAMMARS.items()
}
CLOSERS = ("\n*** End Patch", "\\n*** End Patch", "\n", "\\n")
"""Texts that end patches, plain and in quotes."""


@cache
def model(name: str, tokens: bool) -> Model:
    format = Format(TOOLS[name])
    return Model(format, tuple(filter(is_marker, format.markers())) if tokens else ())


@cache
def plan() -> ToolPlan:
    return tool_plan(
        ChatBody(
            messages=[{"role": "user", "content": "hi"}],
            tools=[
                *(custom_tool(name, "lark", source) for name, source in GRAMMARS.items()),
                custom_tool("letters", "regex", "[a-c]{1,9}<?"),
            ],
            tool_choice="required",
        )
    )


def texts_of(events: Sequence[Event]) -> list[tuple[str, str]]:
    """Return (name, text) of each call of an answer that consists of complete calls."""
    *events, last = events
    assert isinstance(last, Finished)
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case ToolCall(name=name, is_text=True):
                calls.append((name, ""))
            case ToolText(fragment=fragment):
                calls[-1] = (calls[-1][0], calls[-1][1] + fragment)
            case ToolCallEnd(index):
                assert index == len(calls) - 1
            case _:
                raise AssertionError(event)
    return calls


def admits(name: str, text: str) -> bool:
    if name == "letters":
        return re.fullmatch("[a-c]{1,9}<?", text) is not None
    try:
        PARSERS[name].parse(text)
    except lark.exceptions.LarkError:
        return False
    return True


@EVERY
@pytest.mark.parametrize(("tokens", "seed"), WALKS)
def test_each_text_is_one_that_the_grammar_admits(name: str, tokens: bool, seed: int) -> None:
    spoken, wanted = model(name, tokens), plan()
    body: Any = tool_grammar(spoken.bound, wanted)
    said = Walk(spoken, random.Random(seed), CLOSERS)(body)
    calls = texts_of(spoken.read(said, wanted.declared))
    assert calls
    for called, text in calls:
        assert admits(called, text), (called, text)
