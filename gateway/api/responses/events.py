"""Turns the events of an answer into typed stream events and output items.

    created  [queued]  in_progress
        output_item.added  [content_part.added]  ...delta  ...done  [content_part.done]
        output_item.done                                            (for each item, one by one)
    completed | incomplete | failed

One item is open at a time; an event of another kind closes it. A frame is one event, with
consecutive sequence numbers. Most of a frame's JSON is encoded once per item. Usually only the new
text is encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.api.responses.items import Item, item_id, seal
from gateway.api.responses.response import Json, ResponseHead
from gateway.formats.events import (
    Content,
    Event,
    OutputWarning,
    Reasoning,
    ToolArguments,
    ToolCall,
    ToolCallEnd,
)

encode = msgspec.json.encode
Frame = bytes

COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"
LAST_EVENTS = {
    COMPLETED: "response.completed",
    INCOMPLETE: "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}
"""Status -> the event that ends the stream. OpenAI defines no event for "cancelled"."""
ENDS = {
    "stop": (COMPLETED, None),
    "tool_calls": (COMPLETED, None),
    "length": (INCOMPLETE, "max_output_tokens"),
    "abort": ("cancelled", None),
}
"""Finish reason -> (the response's status, reason in incomplete_details)."""


def frame(kind: str, number: int, **members: Any) -> Frame:
    data = encode({"type": kind, **members, "sequence_number": number})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def last_frame(number: int, response: Json) -> Frame:
    """Return the event that ends the stream."""
    return frame(LAST_EVENTS[response["status"]], number, response=response)


def _delta_head(event: str, at: Json) -> bytes:
    """Return the part of a delta frame that precedes the delta."""
    head = encode({"type": event + ".delta", **at})[:-1]
    return b"event: %b.delta\ndata: %b" % (event.encode(), head)


class _Text:
    """An open message or reasoning item. It has one part, whose text arrives in deltas."""

    def __init__(self, events: ResponseEvents, kind: str) -> None:
        self.kind = kind
        self._part, self._event = _TEXTS[kind]
        self._deltas: list[str] = []
        self._logprobs: list[Any] = []
        self._place = len(events.output)
        self._id = item_id(kind, events.head.id, self._place)
        self._seals = events.seals
        self._at = {"item_id": self._id, "output_index": self._place, "content_index": 0}
        self._head = _delta_head(self._event, self._at)
        item = self._item(IN_PROGRESS, [])
        events.emit("response.output_item.added", output_index=self._place, item=item)
        events.emit("response.content_part.added", **self._at, part=self._part_json())

    def push(self, events: ResponseEvents, text: str, logprobs: Sequence[Any] = ()) -> None:
        self._deltas.append(text)
        self._logprobs += logprobs
        data = b',"delta":' + encode(text)
        if self.kind == "message":
            data += b',"logprobs":' + (encode(logprobs) if logprobs else b"[]")
        events.put(b'%b%b,"sequence_number":%d}\n\n' % (self._head, data, events.next_number))

    def close(self, events: ResponseEvents, status: str) -> Item:
        text, more = "".join(self._deltas), {}
        if self.kind == "message":
            more = {"logprobs": self._logprobs}
        events.emit(self._event + ".done", **self._at, text=text, **more)
        part = self._part_json(text)
        events.emit("response.content_part.done", **self._at, part=part)
        item = self._item(status, [part])
        events.emit("response.output_item.done", output_index=self._place, item=item)
        return item

    def _part_json(self, text: str = "") -> Json:
        part: Json = {"type": self._part, "text": text}
        if self.kind == "message":
            part |= {"annotations": [], "logprobs": self._logprobs if text else []}
        return part

    def _item(self, status: str, content: list[Json]) -> Item:
        item: Item = {"type": self.kind, "id": self._id, "status": status}
        if self.kind == "message":
            return item | {"role": "assistant", "content": content}
        sealed = seal("".join(self._deltas)) if self._seals and content else None
        return item | {"summary": [], "content": content, "encrypted_content": sealed}


_TEXTS = {
    "message": ("output_text", "response.output_text"),
    "reasoning": ("reasoning_text", "response.reasoning_text"),
}
"""Item type -> (part type, prefix of the event names)."""


class _Call:
    kind = "function_call"

    def __init__(self, events: ResponseEvents, call: ToolCall) -> None:
        self._call = call
        self._deltas: list[str] = []
        self._place = len(events.output)
        self._id = item_id(self.kind, events.head.id, self._place)
        self._at = {"item_id": self._id, "output_index": self._place}
        self._head = _delta_head("response.function_call_arguments", self._at)
        item = self._item(IN_PROGRESS, "")
        events.emit("response.output_item.added", output_index=self._place, item=item)

    def push(self, events: ResponseEvents, fragment: str) -> None:
        self._deltas.append(fragment)
        data = self._head, encode(fragment), events.next_number
        events.put(b'%b,"delta":%b,"sequence_number":%d}\n\n' % data)

    def close(self, events: ResponseEvents, status: str) -> Item:
        arguments = "".join(self._deltas)
        kind = "response.function_call_arguments.done"
        events.emit(kind, **self._at, name=self._call.name, arguments=arguments)
        item = self._item(status, arguments)
        events.emit("response.output_item.done", output_index=self._place, item=item)
        return item

    def _item(self, status: str, arguments: str) -> Item:
        return {
            "type": self.kind,
            "id": self._id,
            "call_id": self._call.id,
            "name": self._call.name,
            "arguments": arguments,
            "status": status,
        }


class ResponseEvents:
    """The events of one response. Frames collect until `pop_frames`.

    seals   add reasoning as `encrypted_content` too
    output  the closed items
    """

    def __init__(self, head: ResponseHead, *, seals: bool = False) -> None:
        self.head = head
        self.seals = seals
        self.output: list[Item] = []
        self.next_number = 0
        self._open: _Text | _Call | None = None
        self._warnings: list[OutputWarning] = []
        self._frames: list[Frame] = []

    def start(self, *, queued: bool = False) -> None:
        """Write the first events. A `queued` response becomes in_progress with `proceed`."""
        status = "queued" if queued else IN_PROGRESS
        self.emit("response.created", response=self.head.response(status))
        if queued:
            self.emit("response.queued", response=self.head.response(status))
        else:
            self.proceed()

    def proceed(self) -> None:
        self.emit("response.in_progress", response=self.head.response(IN_PROGRESS))

    def push(self, event: Event, logprobs: Sequence[Any] = ()) -> None:
        """Write the frames of an event. `logprobs` are those of a Content event, formatted."""
        match event:
            case Content(text):
                self._text("message").push(self, text, logprobs)
            case Reasoning(text):
                self._text("reasoning").push(self, text)
            case ToolCall():
                self._close(INCOMPLETE if isinstance(self._open, _Call) else COMPLETED)
                self._open = _Call(self, event)
            case ToolArguments(_, fragment):
                assert isinstance(self._open, _Call)
                self._open.push(self, fragment)
            case ToolCallEnd():
                self._close(COMPLETED)
            case OutputWarning():
                self._warnings.append(event)

    def end(
        self,
        status: str,
        *,
        usage: Json | None = None,
        error: Json | None = None,
        incomplete: str | None = None,
        timings: Json | None = None,
    ) -> Json:
        """Close the open item and return the final response. `last_frame` makes its last event."""
        whole = status == COMPLETED and not isinstance(self._open, _Call)
        self._close(COMPLETED if whole else INCOMPLETE)
        return self.head.response(
            status,
            self.output,
            usage=usage,
            error=error,
            incomplete=incomplete,
            warnings=self._warnings,
            timings=timings,
        )

    def pop_frames(self) -> list[Frame]:
        """Return and clear the frames written since the last call."""
        frames, self._frames = self._frames, []
        return frames

    # ---- for the items

    def emit(self, kind: str, **members: Any) -> None:
        self.put(frame(kind, self.next_number, **members))

    def put(self, data: Frame) -> None:
        """Add a frame that has the next sequence number."""
        self._frames.append(data)
        self.next_number += 1

    def _text(self, kind: str) -> _Text:
        """Return the open item of this kind, opening one if needed."""
        if isinstance(self._open, _Text) and self._open.kind == kind:
            return self._open
        self._close(INCOMPLETE if isinstance(self._open, _Call) else COMPLETED)
        self._open = opened = _Text(self, kind)
        return opened

    def _close(self, status: str) -> None:
        if self._open is not None:
            self.output.append(self._open.close(self, status))
            self._open = None
