"""Response templates are read as transformers reads them."""

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

OURS_ALONE = {
    # A closing marker in a string ends the region there; with us it is text if it is spelt out.
    "closing tag in a string",
    # Prose that holds a literal of the template: the same.
    "prose that mentions the tag",
    # Of several regions of text transformers keeps the last; we tell each as it comes.
    "reasoning before and after",
    "reasoning around a call",
}

PAIRS = [
    pytest.param(sample, case, id=f"{sample.name}: {case.name}")
    for sample in SAMPLES
    for case in cases(sample)
    if case.name not in OURS_ALONE
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
    said = chat_parsing.parse_response(text, TEMPLATES[name], prefix="", tools=tools)
    calls = said.get("tool_calls", [])
    return {
        "content": said.get("content", ""),
        "thinking": said.get("thinking", said.get("reasoning_content", "")),
        "calls": [[c["function"]["name"], c["function"]["arguments"]] for c in calls],
    }


@pytest.mark.parametrize(("sample", "case"), PAIRS)
def test_a_template_reads_an_answer_as_transformers_does(sample: Any, case: Fixture) -> None:
    assert ours(sample, case) == theirs(sample.name, case)
