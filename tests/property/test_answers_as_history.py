"""What the server wrote, it takes back: any answer of the Messages API and of Ollama's API, sent
back as history in each way in which thinking is displayed, puts every text of it into the next
prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.anthropic.responses import AnthropicEnvelope
from gateway.api.anthropic.stream import EventWriter, whole_message
from gateway.api.ollama.stream import OllamaEnvelope, whole_record
from gateway.formats.events import (
    INVALID_JSON,
    Content,
    Event,
    Finished,
    OutputDelta,
    Reasoning,
    ToolArguments,
    ToolCall,
    ToolCallEnd,
)
from gateway.generation.sinks import CollectSink
from tests.support.answers import TOKENIZER, WrittenStream, new_choice_group
from tests.support.anthropic import anthropic_events, message_of
from tests.support.api_prompts import prompt_of
from tests.support.examples import examples
from tests.support.scripted_engine import THINKING_TEMPLATE, thinking_card
from tests.support.served import served

REASONING = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
TEMPLATE = THINKING_TEMPLATE.replace("{{ m.content }}", REASONING + "{{ m.content }}")
MODEL = served(thinking_card(chat_template=TEMPLATE))
HI = {"role": "user", "content": "hi"}
CALL = re.compile(r"<tool_call>(.*?)</tool_call>")
NAMES = ("find", "look")

TEXTS = st.text("ab \n{}\"\\'é漢😀.", min_size=1, max_size=12).filter(str.strip)
VALUES = st.one_of(TEXTS, st.integers(-9, 9), st.lists(TEXTS, max_size=2), st.none())
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=3).map(lambda value: json.dumps(value))
BROKEN = st.sampled_from(['{"a": so}', "[1]", '{"a": 1e400}', '{"a": 1} b', "null"])


@dataclass(frozen=True)
class CalledPart:
    """A call in an answer. `is_cut` is whether the answer ended in it."""

    name: str
    arguments: str
    is_cut: bool = False


Part = str | CalledPart
"""A text, which is reasoning or content by turns, or a call."""
PARTS = st.lists(
    st.one_of(TEXTS, st.builds(CalledPart, st.sampled_from(NAMES), st.one_of(OBJECTS, BROKEN))),
    max_size=6,
)


def events_of(parts: Sequence[Part], *, reasons: bool, is_cut: bool) -> list[Event]:
    """Return the events of an answer.

    reasons   the first text is reasoning
    is_cut    the answer ends in its last call, before the call's end
    """
    events: list[Event] = []
    num_texts = num_calls = 0
    for place, part in enumerate(parts):
        if isinstance(part, str):
            is_reasoning = (num_texts + reasons) % 2 == 1
            num_texts += 1
            events.append(Reasoning(part) if is_reasoning else Content(part))
            continue
        middle = len(part.arguments) // 2
        events += [
            ToolCall(num_calls, f"c{num_calls}", part.name),
            ToolArguments(num_calls, part.arguments[:middle]),
            ToolArguments(num_calls, part.arguments[middle:]),
        ]
        if not (is_cut and place == len(parts) - 1):
            events.append(ToolCallEnd(num_calls))
        num_calls += 1
    return [*events, Finished("length" if is_cut else "stop")]


def check(prompt: str, events: Sequence[Event], *, is_cut: bool) -> None:
    """Check that a prompt has every text of an answer, and the results of its calls."""
    for event in events:
        if isinstance(event, Content | Reasoning):
            assert event.text.strip() in prompt
    found = [json.loads(text) for text in CALL.findall(prompt)]
    calls = [event for event in events if isinstance(event, ToolCall)]
    assert [call["name"] for call in found] == [call.name for call in calls]
    assert prompt.count("done with ") == len(calls)
    for place, call in enumerate(calls):
        written = "".join(
            event.fragment
            for event in events
            if isinstance(event, ToolArguments) and event.index == call.index
        )
        if is_cut and place == len(calls) - 1 and isinstance(events[-2], ToolArguments):
            continue  # the part before the cut is tested in test_anthropic_arguments.py
        arguments = found[place]["arguments"]
        if INVALID_JSON in arguments:
            assert arguments[INVALID_JSON] == written
        else:
            assert arguments == json.loads(written)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("display", ["summarized", "updates", "omitted"])
@settings(max_examples=examples(40, 2000), deadline=None)
@given(parts=PARTS, reasons=st.booleans(), is_cut=st.booleans())
def test_a_message_that_is_sent_back_is_in_the_next_prompt(
    display: str, is_stream: bool, parts: list[Part], reasons: bool, is_cut: bool
) -> None:
    events = events_of(parts, reasons=reasons, is_cut=is_cut)
    envelope = AnthropicEnvelope("1", "m", shows_thinking=display != "omitted")
    group = new_choice_group()
    if is_stream:
        written = WrittenStream()
        sink = EventWriter(group, written, envelope)
        for event in events:
            sink.delta(group.choices[0], OutputDelta([event]))
        sink.end()
        message = message_of(anthropic_events(written.data))
    else:
        message = json.loads(whole_message(group, events, envelope))
    if display == "omitted":
        assert not any(block.get("thinking") for block in message["content"])
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": f"done with {block['id']}"}
        for block in message["content"]
        if block["type"] == "tool_use"
    ]
    turns = [
        HI,
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
    ]
    body = {
        "max_tokens": 9,
        "messages": turns,
        "thinking": {"type": "adaptive", "display": display},
    }
    check(prompt_of("messages", body, MODEL), events, is_cut=is_cut)


@pytest.mark.parametrize("ids", ["both", "results", "names"])
@settings(max_examples=examples(40, 2000), deadline=None)
@given(parts=PARTS, reasons=st.booleans(), is_cut=st.booleans())
def test_an_ollama_message_that_is_sent_back_is_in_the_next_prompt(
    ids: str, parts: list[Part], reasons: bool, is_cut: bool
) -> None:
    """`ids` says which messages have the ids of calls: clients drop them from calls, or never send
    them."""
    events = events_of(parts, reasons=reasons, is_cut=is_cut)
    group, collected = new_choice_group(), CollectSink(1)
    collected.delta(group.choices[0], OutputDelta(list(events)))
    record = json.loads(whole_record(group, collected, OllamaEnvelope("m", TOKENIZER)))
    message = record["message"]
    calls = message.get("tool_calls") or []
    results: list[dict[str, Any]] = []
    for call in calls:
        named = {"tool_name": call["function"]["name"]} if ids == "names" else {}
        with_id = {} if ids == "names" else {"tool_call_id": call["id"]}
        results.append({"role": "tool", "content": f"done with {call['id']}", **named, **with_id})
    if ids != "both":
        for call in calls:
            del call["id"]
    body = {"model": "m", "messages": [HI, message, *results, {"role": "user", "content": "go"}]}
    check(prompt_of("ollama", body, MODEL), events, is_cut=is_cut)
