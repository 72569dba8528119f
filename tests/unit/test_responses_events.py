"""Parser events become the typed events of a response: golden bytes, and their order."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.api.responses.events import ResponseEvents, frame, interrupted_response
from gateway.api.responses.items import item_id, response_of, seal
from gateway.api.responses.responses import ResponseEvent, ResponseObject
from gateway.api.responses.stream import ResponseSink, TextLogprobs
from gateway.formats.events import (
    Content,
    Event,
    Failed,
    Finished,
    OutputDelta,
    OutputWarning,
    Reasoning,
    ToolArguments,
    ToolCall,
    ToolCallEnd,
)
from protocol.engine.sampling import SamplingParams
from protocol.wire.errors import EngineLost, ErrorInfo, Overloaded
from tests.support.answers import TOKENIZER, new_choice_group
from tests.support.responses import (
    CollectedFrames,
    a_queued_response,
    items_of,
    kinds,
    typed_events,
)
from tests.support.scripted_engine import scripted_logprob

NUMBER = "0123456789abcdef" * 2
QUEUED = a_queued_response("resp_" + NUMBER)
GOLDEN = Path(__file__).parents[1] / "data" / "responses_stream.txt"


class RecordedResponse:
    """A sink, and the frames that it wrote."""

    def __init__(
        self,
        response: ResponseObject = QUEUED,
        *,
        num_top: int | None = None,
        seals: bool = False,
        **options: Any,
    ) -> None:
        self.answer = new_choice_group()
        self.written = CollectedFrames()
        logprobs = None if num_top is None else TextLogprobs(TOKENIZER, num_top)
        events = ResponseEvents(response, seals=seals)
        self.sink = ResponseSink(self.answer, events, self.written, logprobs, **options)

    def say(self, *events: Event, ids: list[int] | None = None) -> RecordedResponse:
        logprobs = [scripted_logprob(token, 1) for token in ids or []]
        self.sink.delta(self.answer.choices[0], OutputDelta(list(events), ids or [], logprobs))
        return self

    def end(self) -> list[dict[str, Any]]:
        self.sink.end()
        return self.events()

    def events(self) -> list[dict[str, Any]]:
        return typed_events(self.written.data)


CALLS: tuple[Event, ...] = (
    ToolCall(0, "call_1", "f"),
    ToolArguments(0, '{"a"'),
    ToolArguments(0, ":1}"),
    ToolCallEnd(0),
    ToolCall(1, "call_2", "g"),
    ToolArguments(1, "{}"),
    ToolCallEnd(1),
)


def test_streams_have_the_recorded_bytes() -> None:
    """A short response, a queued one with all members, then the ends of a failed and an interrupted
    one."""
    short = RecordedResponse().say(Content('H"é')).say(Content("i"), Finished("stop"))
    short.end()
    response = a_queued_response(
        "resp_" + NUMBER,
        b"""{"input": "hi", "instructions": "be brief", "tool_choice": "auto",
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "max_output_tokens": 9, "metadata": {"a": "b"}, "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}}, "top_logprobs": 1, "user": "u"}""",
        SamplingParams(temperature=0.5, top_p=0.25, frequency_penalty=1.0),
        ignored_params=["text.verbosity"],
        effective={"chat_template_kwargs": {"a": 1}},
    )

    def say_all(recorded: RecordedResponse) -> RecordedResponse:
        recorded.say(Reasoning("h\u00e9"), Reasoning("m"))
        recorded.say(Content('H"i'), ids=list(b'H"i')).say(*CALLS[:4])
        recorded.say(OutputWarning("odd", "it is"), ToolCall(1, "call_2", "g"))
        return recorded.say(ToolArguments(1, "{"), Finished("length"))

    queued = say_all(RecordedResponse(response, num_top=1, seals=True, queued=True))
    queued.end()
    failed = say_all(RecordedResponse(response, num_top=1, seals=True))
    failed.sink.fail(Overloaded("too much"))
    body = msgspec.json.encode(response.in_status("in_progress"))
    interrupted = interrupted_response(response.id, 7, body)
    frames = [*short.written.frames, *queued.written.frames, failed.written.frames[-1]]
    data = b"".join([*frames, interrupted.frame])
    assert re.sub(rb'"completed_at":\d+', b'"completed_at":0', data) == GOLDEN.read_bytes()


@pytest.mark.parametrize("num_top", [None, 1])
def test_every_frame_is_the_encoding_of_its_struct(num_top: int | None) -> None:
    """The frames of text deltas are made from byte templates, so they could differ from the
    encoding of their structs."""
    recorded = RecordedResponse(num_top=num_top).say(Reasoning("h\u00e9"), Reasoning('"%d'), *CALLS)
    recorded.say(Content('"delta":""'), Content("%b"), ids=[*b'"delta":""%b']).end()
    for data in recorded.written.frames:
        name, body = data.removesuffix(b"\n\n").split(b"\n")
        event = msgspec.json.decode(body.removeprefix(b"data: "), type=ResponseEvent)
        assert frame(event) == data, name


def test_each_item_is_opened_and_closed_before_the_next() -> None:
    recorded = RecordedResponse()
    recorded.say(Reasoning("a")).say(Reasoning("b"), Content("c")).say(*CALLS).say(Content("d"))
    events = recorded.say(Finished("tool_calls")).end()
    assert kinds(events) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        "completed",
    ]
    output = events[-1]["response"]["output"]
    assert items_of(events) == output
    assert [item.get("arguments") for item in output] == [None, None, '{"a":1}', "{}", None]
    assert {item["status"] for item in output} == {"completed"}


@pytest.mark.parametrize(
    ("reason", "kind", "status", "details"),
    [
        ("stop", "response.completed", "completed", None),
        ("tool_calls", "response.completed", "completed", None),
        ("length", "response.incomplete", "incomplete", {"reason": "max_output_tokens"}),
        ("abort", "response.incomplete", "cancelled", None),
    ],
)
def test_a_finish_reason_becomes_a_status(
    reason: str, kind: str, status: str, details: dict[str, str] | None
) -> None:
    last = RecordedResponse().say(Content("a"), Finished(reason)).end()[-1]
    response = last["response"]
    assert (last["type"], response["status"]) == (kind, status)
    assert response["incomplete_details"] == details
    assert (response["completed_at"] is None) == (status != "completed")
    assert (response["output"][0]["status"] == "completed") == (status == "completed")


def test_a_call_that_was_cut_off_is_incomplete() -> None:
    recorded = RecordedResponse().say(*CALLS[:2]).say(ToolCall(1, "call_2", "g"))
    output = recorded.say(Finished("length")).end()[-1]["response"]["output"]
    assert [(c["arguments"], c["status"]) for c in output] == [
        ('{"a"', "incomplete"),
        ("", "incomplete"),
    ]


def test_a_failure_is_the_last_event_and_keeps_the_output() -> None:
    recorded = RecordedResponse().say(Content("Hel"))
    recorded.say(Failed(ErrorInfo(code="engine_lost", message="gone")))
    recorded.sink.fail(EngineLost("the engine is gone"))
    recorded.sink.fail(EngineLost("again"))
    last = recorded.events()[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert last["response"]["output"][0]["content"][0]["text"] == "Hel"
    busy = RecordedResponse()
    busy.sink.fail(Overloaded("too much"))
    assert busy.events()[-1]["response"]["error"]["code"] == "rate_limit_exceeded"


def test_a_queued_response_becomes_in_progress_with_the_first_delta() -> None:
    recorded = RecordedResponse(queued=True)
    assert recorded.written.snapshots == []
    recorded.say(Content("a"))
    assert [snapshot.status for snapshot in recorded.written.snapshots] == ["in_progress"]
    events = recorded.say(Finished("stop")).end()
    assert [e["type"] for e in events[:3]] == [
        *("response.created", "response.queued", "response.in_progress")
    ]
    assert [e["response"]["status"] for e in events[:3]] == ["queued", "queued", "in_progress"]


def test_nothing_is_written_after_a_cancel() -> None:
    recorded = RecordedResponse().say(Content("a"))
    recorded.sink.cancel()
    recorded.sink.end()
    assert recorded.events()[-1]["response"]["status"] == "cancelled"


def test_an_empty_answer_has_no_item() -> None:
    events = RecordedResponse().say(Finished("stop")).end()
    assert kinds(events) == ["created", "in_progress", "completed"]
    assert events[-1]["response"]["output"] == []


def test_the_final_response_has_the_warnings() -> None:
    response = (
        RecordedResponse()
        .say(OutputWarning("odd", "it is"), Finished("stop"))
        .end()[-1]["response"]
    )
    assert response["warnings"] == [{"code": "odd", "message": "it is", "choice": None}]


def test_a_split_character_keeps_its_logprobs() -> None:
    recorded = RecordedResponse(num_top=0)
    recorded.say(Content("é"), ids=list("é".encode()))
    recorded.say(Content("??"), Finished("stop"), ids=[1, 2, 3])
    part = recorded.end()[-1]["response"]["output"][0]["content"][0]
    assert len(part["logprobs"]) == 2 + 3


def test_a_complete_item_has_the_encrypted_reasoning() -> None:
    events = RecordedResponse(seals=True).say(Reasoning("Déep"), Finished("stop")).end()
    (item,) = events[-1]["response"]["output"]
    assert item["encrypted_content"] == seal("Déep")
    added = next(e for e in events if e["type"] == "response.output_item.added")
    assert added["item"]["encrypted_content"] is None


def test_item_ids_contain_the_id_of_their_response() -> None:
    assert response_of(item_id("reasoning", QUEUED.id, 3)) == QUEUED.id
    assert response_of(item_id("message", QUEUED.id, 0, in_input=True)) == QUEUED.id
    for other in ("msg_1", "resp_" + NUMBER, f"rs_{NUMBER}_x", f"rs_{NUMBER[1:]}_1"):
        assert response_of(other) is None


def test_a_response_whose_process_died_has_failed() -> None:
    body = msgspec.json.encode(QUEUED.in_status("in_progress"))
    interruption = interrupted_response(QUEUED.id, 7, body)
    (event,) = typed_events(interruption.frame)
    assert (event["type"], event["sequence_number"]) == ("response.failed", 7)
    assert interruption.body is not None
    assert json.loads(interruption.body) == event["response"]
    assert event["response"]["status"] == "failed"
