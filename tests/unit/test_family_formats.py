"""Calls and thoughts written as a family's published chat template has them are parsed back."""

from __future__ import annotations

import json

import pytest

from gateway.formats.choice_parser import AnswerOptions, ParserFactory
from gateway.formats.events import Content, Event, Reasoning, ToolArguments, ToolCall, merged
from protocol.engine.messages import Output
from tests.support.family_formats import CALL, PUBLISHED, THOUGHT, PublishedTemplate
from worker.spec.families.registry import FAMILIES

BY_TEMPLATE = pytest.mark.parametrize("published", PUBLISHED, ids=lambda each: each.name)


def parsed(published: PublishedTemplate, prompt: str, answer: str, size: int) -> list[Event]:
    """Return the merged events of an answer, of which `size` tokens arrive at a time."""
    start = published.output_format.answer_start(prompt, {}, calls=True)
    assert start.bound is not None
    options = AnswerOptions(format=start.bound, starts_inside=start.inside, new_id=lambda: "id")
    parser = ParserFactory(published.tokenizer, None, options).new()
    ids = published.tokenizer.encode(answer, False)
    events: list[Event] = []
    for at in range(0, len(ids), size):
        events += parser.push(Output(request=1, tokens=ids[at : at + size])).events
    return merged([*events, *parser.push(Output(request=1, finish="stop")).events])


@BY_TEMPLATE
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_call_that_the_template_writes_is_parsed_as_that_call(
    published: PublishedTemplate, size: int
) -> None:
    prompt, answer = published.call_answer()
    for end in ("<|im_end|>", "</s>", "<eos>"):  # the engine does not send the end token
        answer = answer.rstrip().removesuffix(end)
    events = parsed(published, prompt, answer, size)
    thoughts = [event.text.strip() for event in events if isinstance(event, Reasoning)]
    assert thoughts == ([THOUGHT] if published.has_reasoning else [])
    assert [event.name for event in events if isinstance(event, ToolCall)] == [CALL["name"]]
    (arguments,) = (event.fragment for event in events if isinstance(event, ToolArguments))
    assert json.loads(arguments) == CALL["arguments"]
    assert "".join(event.text for event in events if isinstance(event, Content)).strip() == ""


@BY_TEMPLATE
def test_the_families_of_a_template_are_served(published: PublishedTemplate) -> None:
    assert {*published.families} <= {family.architecture for family in FAMILIES}
