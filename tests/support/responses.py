"""Parses and checks streams of the Responses API, and folds them into output items."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from gateway.api.responses.events import Frame, last_frame
from gateway.api.responses.requests import ResponsesBody
from gateway.api.responses.responses import ResponseObject, new_response
from protocol.engine.sampling import SamplingParams

RESPONSES = "/v1/responses"
ENDS = ("response.completed", "response.incomplete", "response.failed")


def a_queued_response(
    response_id: str,
    body: bytes = b'{"input":"hi"}',
    params: SamplingParams | None = None,
    **extensions: Any,
) -> ResponseObject:
    response = new_response(
        msgspec.json.decode(body, type=ResponsesBody),
        params or SamplingParams(),
        model="m",
        fingerprint="fp",
        stores=True,
        extensions=extensions,
    )
    return msgspec.structs.replace(response, id=response_id, created_at=12)


class CollectedFrames:
    """A frame writer that collects the frames, and passes them to `write`."""

    def __init__(
        self,
        write: Callable[[bytes], object] = lambda data: None,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        self.frames: list[Frame] = []
        self.snapshots: list[ResponseObject] = []
        self.response: ResponseObject | None = None
        self._write = write
        self._finish = finish

    def start(self, response: ResponseObject) -> None:
        self.snapshots.append(response)

    def write(self, frames: list[Frame]) -> None:
        assert self.response is None
        assert frames
        self.frames += frames
        self._write(b"".join(frames))

    def close(self, response: ResponseObject, number: int) -> None:
        assert self.response is None
        self.write([last_frame(number, response)])
        self.response = response
        self._finish()

    @property
    def data(self) -> bytes:
        return b"".join(self.frames)

    @property
    def whole(self) -> dict[str, Any]:
        """Return the final response, as its JSON is decoded."""
        assert self.response is not None
        response: dict[str, Any] = msgspec.to_builtins(self.response)
        return response


AT_ONCE = ("local_shell_call", "shell_call", "apply_patch_call", "tool_search_call")
"""Types of items whose members are sent when the item is complete."""


def typed_events(data: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream. Checks that SSE names equal types, that sequence numbers have
    no gap, and that only the last event ends the response."""
    frames = data.split(b"\n\n")
    assert frames.pop() == b"", "a stream ends with an empty line"
    events = []
    for frame in frames:
        if frame.startswith(b":"):
            continue
        name, _, rest = frame.partition(b"\n")
        event = json.loads(rest.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        events.append(event)
    first = events[0]["sequence_number"]
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    assert [event["type"] in ENDS for event in events] == [False] * (len(events) - 1) + [True]
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of the events. Adjacent repeats are left out."""
    types = [event["type"].removeprefix("response.") for event in events]
    return [kind for i, kind in enumerate(types) if not i or types[i - 1] != kind]


def items_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the output items, put together from the deltas of a stream. Checks that they equal the
    complete items in the stream."""
    items: dict[int, dict[str, Any]] = {}
    for event in events:
        place: Any = event.get("output_index")
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert place == len(items)
                items[place] = {**event["item"]}
            case "content_part.added":
                items[place]["content"] = [*items[place]["content"], {**event["part"]}]
            case "output_text.delta":
                part = items[place]["content"][event["content_index"]]
                part["text"] += event["delta"]
                part["logprobs"] = part["logprobs"] + event["logprobs"]
            case "reasoning_text.delta":
                items[place]["content"][event["content_index"]]["text"] += event["delta"]
            case "reasoning_summary_part.added":
                items[place]["summary"] = [*items[place]["summary"], {**event["part"]}]
            case "reasoning_summary_text.delta":
                items[place]["summary"][event["summary_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                items[place]["arguments"] += event["delta"]
            case "custom_tool_call_input.delta":
                items[place]["input"] += event["delta"]
            case "output_item.done" if event["item"]["type"] in AT_ONCE:
                items[place] = event["item"]
            case "output_item.done":
                items[place]["status"] = event["item"]["status"]
                assert event["item"].get("encrypted_content") is None
                assert items[place] == event["item"]
    return [items[place] for place in sorted(items)]


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items without their ids, which are random."""
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]
