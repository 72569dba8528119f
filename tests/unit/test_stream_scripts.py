"""Laws of the streams of four APIs, for each answer of `event_scripts`.

A whole answer is the folded stream, in whatever deltas the events arrive, and an error ends a
stream. What only one API does is tested in its own file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from gateway.api.anthropic.responses import AnsweredMessage, AnthropicEnvelope
from gateway.api.anthropic.stream import EventWriter, whole_message
from gateway.api.ollama.stream import LineWriter, OllamaEnvelope, whole_record
from gateway.api.openai.response_builder import ChatResponseBuilder, OpenAIEnvelope
from gateway.api.openai.stream import ChunkStream, whole_response
from gateway.api.responses.events import ResponseEvents
from gateway.api.responses.stream import ResponseSink
from gateway.formats.events import (
    Content,
    Event,
    Failed,
    OutputDelta,
    Reasoning,
    ToolArguments,
    ToolCall,
    merged,
)
from gateway.generation.group import ChoiceGroup
from gateway.generation.sinks import CollectSink, Sink
from protocol.wire.errors import ErrorInfo, Overloaded
from tests.support.answers import TOKENIZER, WrittenStream, new_choice_group
from tests.support.anthropic import anthropic_events, message_of
from tests.support.event_scripts import SCRIPTS
from tests.support.http import events_of, fold_chat_response, fold_chat_stream
from tests.support.responses import CollectedFrames, a_queued_response, items_of, typed_events

Said = tuple[str, str, list[str]]


@dataclass(frozen=True)
class Api:
    """One API.

    sink    makes a sink that writes its stream to a destination
    fold    returns the answer that a stream describes
    whole   returns the answer to the events of one choice that is not streamed
    said    returns reasoning, text and names of called tools of an answer
    error   returns the error that ends a stream
    """

    sink: Callable[[ChoiceGroup, WrittenStream], Sink]
    fold: Callable[[bytes], Any]
    whole: Callable[[ChoiceGroup, list[Event]], Any]
    said: Callable[[Any], Said]
    error: Callable[[bytes], Any]


# ---- chat

CHAT = OpenAIEnvelope("chatcmpl-1", "m", "print", created=12)


def chat_whole(group: ChoiceGroup, events: list[Event]) -> Any:
    builder = ChatResponseBuilder(TOKENIZER, None)
    return fold_chat_response(
        json.loads(whole_response(group, collected(group, events), builder, CHAT))
    )


def chat_said(answer: Any) -> Said:
    choice = answer[0]
    return choice["reasoning"], choice["content"], [name for _, name, _ in choice["calls"]]


def collected(group: ChoiceGroup, events: list[Event]) -> CollectSink:
    sink = CollectSink(1)
    sink.delta(group.choices[0], OutputDelta(events))
    return sink


# ---- messages

MESSAGES = AnthropicEnvelope("1", "m", extensions={"ignored_params": ["speed"]})


def message_whole(group: ChoiceGroup, events: list[Event]) -> Any:
    message = whole_message(group, events, MESSAGES)
    msgspec.json.decode(message, type=AnsweredMessage)
    return json.loads(message)


def message_said(answer: Any) -> Said:
    blocks = answer["content"]
    thinking = "".join(block.get("thinking", "") for block in blocks)
    text = "".join(block.get("text", "") for block in blocks)
    return thinking, text, [block["name"] for block in blocks if block["type"] == "tool_use"]


# ---- responses


def response_sink(group: ChoiceGroup, destination: WrittenStream) -> ResponseSink:
    written = CollectedFrames(write=destination.write, finish=destination.finish)
    return ResponseSink(group, ResponseEvents(a_queued_response("resp_1")), written, None)


def response_fold(data: bytes) -> Any:
    events = typed_events(data)
    end: dict[str, Any] = events[-1]["response"]
    return {**end, "output": items_of(events), "completed_at": end["completed_at"] is not None}


def response_whole(group: ChoiceGroup, events: list[Event]) -> Any:
    written = CollectedFrames()
    sink = ResponseSink(group, ResponseEvents(a_queued_response("resp_1")), written, None)
    sink.delta(group.choices[0], OutputDelta(events))
    sink.end()
    return {**written.whole, "completed_at": written.whole["completed_at"] is not None}


def response_said(answer: Any) -> Said:
    def texts(kind: str) -> str:
        items = [item for item in answer["output"] if item["type"] == kind]
        return "".join(part["text"] for item in items for part in item["content"])

    names = [item["name"] for item in answer["output"] if item["type"] == "function_call"]
    return texts("reasoning"), texts("message"), names


# ---- Ollama

OLLAMA = OllamaEnvelope("m", TOKENIZER)
TIMES = ("created_at", "total_duration", "prompt_eval_duration", "eval_duration")


def ollama_fold(data: bytes) -> Any:
    *records, last = [json.loads(line) for line in data.splitlines()]
    assert not any(record["done"] for record in records)
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for part in [record["message"] for record in (*records, last)]:
        for name, value in part.items():
            if name != "role":
                message[name] = message[name] + value if name in message else value
    return {name: last[name] for name in last if name not in TIMES} | {"message": message}


def ollama_whole(group: ChoiceGroup, events: list[Event]) -> Any:
    return ollama_fold(whole_record(group, collected(group, events), OLLAMA))


def ollama_said(answer: Any) -> Said:
    message = answer["message"]
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    return message.get("thinking", ""), message["content"], names


APIS = {
    "chat": Api(
        lambda group, written: ChunkStream(
            group, written, ChatResponseBuilder(TOKENIZER, None), CHAT
        ),
        lambda data: fold_chat_stream(events_of(data)),
        chat_whole,
        chat_said,
        lambda data: events_of(data)[-1]["error"]["code"],
    ),
    "messages": Api(
        lambda group, written: EventWriter(group, written, MESSAGES),
        lambda data: message_of(anthropic_events(data)),
        message_whole,
        message_said,
        lambda data: anthropic_events(data)[-1]["error"]["details"]["error_code"],
    ),
    "responses": Api(
        response_sink,
        response_fold,
        response_whole,
        response_said,
        lambda data: typed_events(data)[-1]["response"]["error"]["code"],
    ),
    "ollama": Api(
        lambda group, written: LineWriter(group, written, OLLAMA),
        ollama_fold,
        ollama_whole,
        ollama_said,
        lambda data: json.loads(data.splitlines()[-1])["error"],
    ),
}
EACH = pytest.mark.parametrize("api", APIS.values(), ids=APIS)
SCRIPT = pytest.mark.parametrize("events", SCRIPTS.values(), ids=SCRIPTS)


class Streamed(WrittenStream):
    """A stream of one answer, which the test makes."""

    def __init__(self, api: Api) -> None:
        super().__init__()
        self.group = new_choice_group()
        self.sink = api.sink(self.group, self)

    def push(self, *events: Event) -> None:
        self.sink.delta(self.group.choices[0], OutputDelta(list(events)))


def streamed(api: Api, events: list[Event], size: int = 1) -> bytes:
    stream = Streamed(api)
    for at in range(0, len(events), size):
        stream.push(*events[at : at + size])
    assert stream.num_ends == 0
    stream.sink.end()
    assert stream.num_ends == 1
    return stream.data


def letters(events: list[Event]) -> list[Event]:
    """Return the same answer in events of one letter."""
    small: list[Event] = []
    for event in events:
        match event:
            case Content(text) | Reasoning(text):
                small += [type(event)(letter) for letter in text]
            case ToolArguments(index, fragment):
                small += [ToolArguments(index, letter) for letter in fragment]
            case _:
                small.append(event)
    return small


@EACH
@SCRIPT
@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_whole_answer_equals_the_folded_stream(api: Api, events: list[Event], size: int) -> None:
    assert api.fold(streamed(api, events, size)) == api.whole(new_choice_group(), events)


@EACH
@SCRIPT
def test_an_answer_has_everything_that_the_model_said(api: Api, events: list[Event]) -> None:
    assert api.said(api.whole(new_choice_group(), events)) == (
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        "".join(event.text for event in events if isinstance(event, Content)),
        [event.name for event in events if isinstance(event, ToolCall)],
    )


@EACH
@SCRIPT
def test_an_answer_does_not_depend_on_how_its_events_are_split(
    api: Api, events: list[Event]
) -> None:
    whole = api.whole(new_choice_group(), events)
    assert api.whole(new_choice_group(), letters(events)) == whole
    assert api.whole(new_choice_group(), merged(events)) == whole
    assert api.fold(streamed(api, letters(events))) == whole


@EACH
@pytest.mark.parametrize("before", [[], [Content("half")]], ids=["at once", "after some text"])
def test_an_error_is_the_last_event_of_a_stream(api: Api, before: list[Event]) -> None:
    stream = Streamed(api)
    for event in before:
        stream.push(event)
    stream.push(Failed(ErrorInfo(code="x", message="y")))
    stream.sink.fail(Overloaded("too much"))
    assert api.error(stream.data) in ("overloaded", "rate_limit_exceeded", "too much")
    assert b'"y"' not in stream.data
    assert stream.num_ends == 1
