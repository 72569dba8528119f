"""Response templates parse answers as transformers does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.formats.events import Content, Reasoning, ToolArguments, ToolCall, merged
from tests.property.test_tools_response_template import SAMPLES, cases
from tests.support.format_tools import TYPED_TOOLS
from tests.support.formats import JOINT, Fixture, lexicon, units
from tests.support.response_templates import TEMPLATES

chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")

DIFFERENT = {
    # In transformers, a closing marker in a string ends the region. Here it is text, unless it is
    # one special token.
    "closing tag in a string",
    # The same holds for prose that contains a literal of the template.
    "prose that mentions the tag",
    # transformers keeps only the last of several regions of text. Tidegate emits each one.
    "reasoning before and after",
    "reasoning around a call",
}

PAIRS = [
    pytest.param(sample, case, id=f"{sample.name}: {case.name}")
    for sample in SAMPLES
    for case in cases(sample)
    if case.name not in DIFFERENT
]


def ours(sample: Any, case: Fixture) -> dict[str, Any]:
    words = lexicon(sample, tokens=True)
    machine = sample.format.parser(words, tools=TYPED_TOOLS)
    events = [event for piece in units(case.text, words) for event in machine.push(piece)]
    message: dict[str, Any] = {"content": "", "thinking": "", "calls": []}
    for event in merged(events + machine.finish()):
        match event:
            case Content(text):
                message["content"] += text
            case Reasoning(text):
                message["thinking"] += text
            case ToolCall():
                message["calls"].append([event.name, None])
            case ToolArguments(_, fragment):
                message["calls"][-1][1] = json.loads(fragment)
    return message


def theirs(name: str, case: Fixture) -> dict[str, Any]:
    tools = [
        {"type": "function", "function": {"name": t.name, "parameters": t.parameters}}
        for t in TYPED_TOOLS
    ]
    text = case.text.replace(JOINT, "")
    parsed = chat_parsing.parse_response(text, TEMPLATES[name], prefix="", tools=tools)
    calls = parsed.get("tool_calls", [])
    return {
        "content": parsed.get("content", ""),
        "thinking": parsed.get("thinking", parsed.get("reasoning_content", "")),
        "calls": [[c["function"]["name"], c["function"]["arguments"]] for c in calls],
    }


@pytest.mark.parametrize(("sample", "case"), PAIRS)
def test_a_response_template_parses_an_answer_as_transformers_does(
    sample: Any, case: Fixture
) -> None:
    assert ours(sample, case) == theirs(sample.name, case)
