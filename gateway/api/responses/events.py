"""Turns the events of an answer into typed stream events and output items.

    created  [queued]  in_progress
        output_item.added  [content_part.added]  ...delta  ...done  [content_part.done]
        output_item.done                                            (for each item, one by one)
    completed | incomplete | failed

One item is open at a time. An answer event of another kind closes it. A frame contains one stream
event. The sequence numbers of stream events are consecutive.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.responses import responses
from gateway.api.responses.items import item_id, seal
from gateway.api.responses.open_calls import OpenCall, open_call
from gateway.api.responses.responses import (
    ItemStatus,
    OutputItem,
    ResponseEvent,
    ResponseObject,
    ResponseStatus,
    SummaryText,
)
from gateway.api.responses.tools import NO_TOOLS, ResponseTools
from gateway.formats.events import (
    Content,
    Event,
    OutputWarning,
    Reasoning,
    ToolArguments,
    ToolCall,
    ToolCallEnd,
    ToolText,
)
from gateway.observe.timings import Timings
from gateway.store.queries import Interruption
from gateway.text.logprobs import ChatLogprob

encode = msgspec.json.encode
Frame = bytes

LAST_EVENTS: Mapping[ResponseStatus, str] = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}
"""Status of the response -> type of the event that ends the stream. OpenAI defines no event for
"cancelled"."""
_INTERRUPTED = responses.ResponseFault(
    code="server_error",
    message="the server process that generated this response ended before it was complete",
    param=None,
    type="engine_lost",
)


def frame(event: ResponseEvent) -> Frame:
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), encode(event))


def last_frame(number: int, response: ResponseObject) -> Frame:
    """Return the frame that ends the stream. It contains the final response.

    number  sequence number of the event
    """
    kind = LAST_EVENTS[response.status]
    return frame(ResponseEvent(type=kind, response=response, sequence_number=number))


def interrupted_response(response_id: str, number: int, body: bytes | None) -> Interruption:
    """Return the last event and the final state of a background response whose process ended.

    `body` is the stored response. Another version of the server may have written it, so it is not
    decoded into a struct. Its output is kept.
    """
    assert body is not None, "a background response is stored from its start"
    response = msgspec.json.decode(body) | {"status": "failed", "error": _INTERRUPTED}
    event = ResponseEvent(type="response.failed", response=response, sequence_number=number)
    return Interruption(frame(event), encode(response))


class TextKind(msgspec.Struct, frozen=True):
    """How the text of an item is streamed.

    item       type of the item
    event      beginning of the types of the events with its text
    part       beginning of the types of the events around its text
    index      member of these events that numbers the part
    """

    item: Literal["message", "reasoning"]
    event: str
    part: str
    index: str


_MESSAGE = TextKind("message", "output_text", "content_part", "content_index")
_REASONING = TextKind("reasoning", "reasoning_text", "content_part", "content_index")
_SUMMARY = TextKind(
    "reasoning", "reasoning_summary_text", "reasoning_summary_part", "summary_index"
)


class _OpenText:
    """A message or reasoning item that is not complete. The text of its one part arrives in
    deltas."""

    def __init__(self, events: ResponseEvents, kind: TextKind) -> None:
        self.kind = kind
        self._events = events
        self._event = f"response.{kind.event}"
        self._deltas: list[str] = []
        self._logprobs: list[ChatLogprob] = []
        self._at = {**events.next_place(kind.item), kind.index: 0}
        self._template = self._delta_template()
        events.emit_item("added", self._item("in_progress", []))
        self._emit(f"response.{kind.part}.added", part=self._part(""))

    def push(self, text: str, logprobs: Sequence[ChatLogprob] = ()) -> None:
        self._deltas.append(text)
        self._logprobs += logprobs
        if logprobs:
            self._emit(f"{self._event}.delta", delta=text, logprobs=logprobs)
        else:
            self._events.put(self._template % (encode(text), self._events.next_number))

    def close(self, status: ItemStatus) -> OutputItem:
        text = "".join(self._deltas)
        logprobs = self._logprobs if self.kind is _MESSAGE else UNSET
        part = self._part(text)
        self._emit(f"{self._event}.done", text=text, logprobs=logprobs)
        self._emit(f"response.{self.kind.part}.done", part=part)
        return self._events.emit_item("done", self._item(status, [part]))

    def _emit(self, kind: str, **members: Any) -> None:
        self._events.emit(kind, **self._at, **members)

    def _delta_template(self) -> bytes:
        """Return the frame of a delta, with %b in place of its text and %d in place of its sequence
        number. Encoding a struct for each delta takes six times as long."""
        empty = ResponseEvent(
            type=f"{self._event}.delta",
            **self._at,
            delta="",
            logprobs=[] if self.kind is _MESSAGE else UNSET,
            sequence_number=0,
        )
        template = frame(empty).replace(b'"delta":""', b'"delta":%b')
        return template.replace(b'"sequence_number":0', b'"sequence_number":%d')

    def _part(self, text: str) -> responses.OutputText | responses.ReasoningText | SummaryText:
        if self.kind is _SUMMARY:
            return SummaryText(text=text)
        if self.kind is _REASONING:
            return responses.ReasoningText(text=text)
        logprobs = self._logprobs if text else []
        return responses.OutputText(text=text, annotations=[], logprobs=logprobs)

    def _item(self, status: ItemStatus, parts: list[Any]) -> OutputItem:
        item_id = self._at["item_id"]
        if self.kind is _MESSAGE:
            return responses.OutputMessage(
                id=item_id, status=status, role="assistant", content=parts
            )
        is_summary = self.kind is _SUMMARY
        sealed = seal("".join(self._deltas)) if self._events.seals and parts else None
        return responses.ReasoningItem(
            id=item_id,
            status=status,
            summary=parts if is_summary else [],
            content=[] if is_summary else parts,
            encrypted_content=sealed,
        )


class ResponseEvents:
    """Writes the frames of one response. They are collected until `pop_frames`."""

    def __init__(
        self,
        response: ResponseObject,
        *,
        seals: bool = False,
        summarizes: bool = False,
        tools: ResponseTools = NO_TOOLS,
        warnings: Sequence[OutputWarning] = (),
    ) -> None:
        #: The response without its output.
        self.response = response
        #: Whether to also send the reasoning as `encrypted_content`.
        self.seals = seals
        #: Whether to send the reasoning as a summary.
        self._reasoning = _SUMMARY if summarizes else _REASONING
        self._tools = tools
        #: The sequence number of the next event.
        self.next_number = 0
        self._output: list[OutputItem] = []
        self._open: _OpenText | OpenCall | None = None
        self._warnings: list[OutputWarning] = [*warnings]
        self._frames: list[Frame] = []

    def start(self, *, queued: bool = False) -> None:
        """Write the first events. If `queued`, the response stays queued until `proceed` is
        called."""
        response = self.response.in_status("queued" if queued else "in_progress")
        self.emit("response.created", response=response)
        if queued:
            self.emit("response.queued", response=response)
        else:
            self.proceed()

    def proceed(self) -> None:
        """Write the `response.in_progress` event."""
        self.emit("response.in_progress", response=self.response.in_status("in_progress"))

    def push(self, event: Event, logprobs: Sequence[ChatLogprob] = ()) -> None:
        """Write the frames for an event.

        logprobs  logprobs of the tokens of a Content event
        """
        match event:
            case Content(text):
                self._text(_MESSAGE).push(text, logprobs)
            case Reasoning(text):
                self._text(self._reasoning).push(text)
            case ToolCall():
                self._close_for_next()
                self._open = open_call(self, event, self._tools.shape(event.name))
            case ToolArguments(_, fragment) | ToolText(_, fragment):
                assert isinstance(self._open, OpenCall)
                self._open.push(fragment)
            case ToolCallEnd():
                self._close("completed")
            case OutputWarning():
                self._warnings.append(event)

    def end(
        self,
        status: ResponseStatus,
        *,
        usage: responses.ResponseUsage | None = None,
        error: responses.ResponseFault | None = None,
        incomplete: responses.IncompleteDetails | None = None,
        timings: Timings | UnsetType = UNSET,
    ) -> ResponseObject:
        """Close the open item and return the final response. The last event is not written here:
        `last_frame` makes it from the final response."""
        whole = status == "completed" and not isinstance(self._open, OpenCall)
        self._close("completed" if whole else "incomplete")
        return msgspec.structs.replace(
            self.response,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            error=error,
            incomplete_details=incomplete,
            output=self._output,
            usage=usage,
            warnings=responses.warnings_of(self._warnings),
            timings=timings,
        )

    def pop_frames(self) -> list[Frame]:
        """Return and clear the frames written since the last call."""
        frames, self._frames = self._frames, []
        return frames

    # ---- called by the open item

    def emit(self, kind: str, **members: Any) -> None:
        """Write an event of type `kind` with these members."""
        self.put(frame(ResponseEvent(type=kind, sequence_number=self.next_number, **members)))

    def put(self, data: Frame) -> None:
        """Add a frame whose sequence number is `next_number`."""
        self._frames.append(data)
        self.next_number += 1

    def emit_item(self, change: Literal["added", "done"], item: OutputItem) -> OutputItem:
        place = len(self._output)
        self.emit(f"response.output_item.{change}", output_index=place, item=item)
        return item

    def next_place(self, kind: str) -> dict[str, Any]:
        """Return the event members that identify the next item: `item_id` and `output_index`.

        kind  the item's type
        """
        place = len(self._output)
        return {"item_id": item_id(kind, self.response.id, place), "output_index": place}

    def _text(self, kind: TextKind) -> _OpenText:
        """Return the open item if it is of this kind, else open a new one."""
        if isinstance(self._open, _OpenText) and self._open.kind is kind:
            return self._open
        self._close_for_next()
        self._open = opened = _OpenText(self, kind)
        return opened

    def _close_for_next(self) -> None:
        """Close the open item before another one starts. A call that is still open was cut off."""
        self._close("incomplete" if isinstance(self._open, OpenCall) else "completed")

    def _close(self, status: ItemStatus) -> None:
        if self._open is not None:
            self._output.append(self._open.close(status))
            self._open = None
