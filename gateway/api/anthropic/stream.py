"""Writes an answer as Anthropic's events.

    message_start  ping  [content_block_start  content_block_delta ...  content_block_stop] ...
    message_delta  message_stop

- `message_start` is sent with the first delta, because the number of cached tokens is not known
  earlier.
- An idle stream is kept alive with `ping`; before `message_start`, where clients do not expect a
  ping, with comments.
- `message_delta` has the final usage, the warnings and the timings.
- After an error, one `error` event ends the stream.
- Most of a frame's JSON is encoded once per block. Usually only the new text is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gateway.api.anthropic.blocks import ContentBlocks, Kind
from gateway.api.anthropic.envelope import (
    NO_END,
    AnthropicEnvelope,
    empty_block,
    encode,
    end_of,
    usage_at_start,
    usage_of,
    warnings_member,
)
from gateway.api.anthropic.errors import error_body
from gateway.formats.events import OutputDelta, ToolCall
from gateway.generation.choice import Choice
from gateway.generation.group import ChoiceGroup
from gateway.http.errors import fault_of
from gateway.observe.timings import told_timings
from protocol.errors import ServingError

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b'
_DELTA_TYPES: Mapping[Kind, bytes] = {
    "text": b'{"type":"text_delta","text":',
    "thinking": b'{"type":"thinking_delta","thinking":',
    "tool_use": b'{"type":"input_json_delta","partial_json":',
}
_SIGNATURE = b'{"type":"signature_delta","signature":'
_DELTA_END = b"}}\n\n"


def event(kind: str, **members: Any) -> bytes:
    name = kind.encode()
    return b"event: %b\ndata: %b\n\n" % (name, encode({"type": kind, **members}))


class EventWriter:
    """The sink that writes one answer as events.

    write     receives each group of frames
    finish    called after the last frame
    on_start  called before the first frame
    """

    def __init__(
        self,
        group: ChoiceGroup,
        envelope: AnthropicEnvelope,
        *,
        write: Callable[[bytes], None],
        finish: Callable[[], None],
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._group = group
        self._envelope = envelope
        self._write = write
        self._finish = finish
        self._on_start = on_start
        self._has_started = False
        self._blocks = ContentBlocks(self, shows_thinking=envelope.shows_thinking)
        self._frames: list[bytes] = []
        self._index = 0
        self._delta_head = b""

    # ---- for the answer

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        for item in delta.events:
            self._blocks.push(item)
        if self._frames:
            self._write(self._opening() + b"".join(self._frames))
            self._frames.clear()

    def end(self) -> None:
        finished = self._blocks.finished
        assert finished is not None, "an answer that has ended has a Finished event"
        warnings = warnings_member([*self._envelope.warnings, *self._blocks.warnings])
        last = event(
            "message_delta",
            delta=end_of(finished, self._group),
            usage=self._usage(),
            **warnings,
            **told_timings(self._group),
        )
        self._write(self._opening() + last + event("message_stop"))
        self._finish()

    def fail(self, error: ServingError) -> None:
        self._write(
            b"event: error\ndata: %b\n\n" % error_body(fault_of(error), self._envelope.request_id)
        )
        self._finish()

    def _opening(self) -> bytes:
        """Return `message_start` and the first `ping`, once."""
        if self._has_started:
            return b""
        self._has_started = True
        self._on_start()
        message = self._envelope.message([], NO_END, usage_at_start(self._usage()))
        return event("message_start", message=message) + PING

    def _usage(self) -> dict[str, Any]:
        return usage_of(self._group, self._envelope.block_tokens)

    # ---- for the blocks

    def start(self, index: int, kind: Kind, call: ToolCall | None) -> None:
        self._index = index
        self._delta_head = _DELTA % (index, _DELTA_TYPES[kind])
        block = empty_block(kind, call)
        self._frames.append(event("content_block_start", index=index, content_block=block))

    def block_delta(self, text: str) -> None:
        self._frames.append(self._delta_head + encode(text) + _DELTA_END)

    def stop(self, signature: str | None) -> None:
        if signature is not None:
            head = _DELTA % (self._index, _SIGNATURE)
            self._frames.append(head + encode(signature) + _DELTA_END)
        self._frames.append(event("content_block_stop", index=self._index))
