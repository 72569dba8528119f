"""Writes an answer as a stream of Anthropic's events, or as one message with the same content.

    message_start  ping  [content_block_start  content_block_delta ...  content_block_stop] ...
    message_delta  message_stop

- `message_start` is sent with the first delta, because the number of cached tokens is not known
  earlier.
- While a stream is idle, `ping` events keep it alive. Before `message_start` clients do not expect
  a ping, so comments are sent instead.
- `message_delta` has the final usage, the warnings and the timings.
- After an error, one `error` event ends the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from gateway.api.anthropic import responses
from gateway.api.anthropic.blocks import BlockKind, ContentBlocks
from gateway.api.anthropic.responses import AnthropicEnvelope, content_block, encode
from gateway.formats.events import Event, OutputDelta, ToolCall
from gateway.generation.frame_sink import FrameDestination, FrameSink
from gateway.generation.group import ChoiceGroup
from gateway.generation.request import Choice
from gateway.http.errors import HTTPFault
from gateway.observe.timings import timings_of_group

_DELTAS: Mapping[
    BlockKind,
    Callable[[str], responses.TextDelta | responses.ThinkingDelta | responses.InputJsonDelta],
] = {
    "text": responses.TextDelta,
    "thinking": responses.ThinkingDelta,
    "tool_use": responses.InputJsonDelta,
}


def frame(event: responses.StreamEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), encode(event))


PING = frame(responses.AnthropicPing())


class EventWriter(FrameSink):
    """The sink that writes one answer as Anthropic's events. `on_start` is called before
    `message_start` is written."""

    def __init__(
        self,
        group: ChoiceGroup,
        destination: FrameDestination,
        envelope: AnthropicEnvelope,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(group, destination)
        self._envelope = envelope
        self._on_start = on_start
        self._has_started = False
        self._block_frames = _BlockFrames()
        self._blocks = ContentBlocks(self._block_frames, shows_thinking=envelope.shows_thinking)

    def frames(self, choice: Choice, delta: OutputDelta) -> bytes:
        for item in delta.events:
            self._blocks.push(item)
        frames = self._block_frames.pop()
        return self._opening() + frames if frames else b""

    def closing(self) -> bytes:
        finished = self._blocks.finished
        assert finished is not None, "an answer that has ended has a Finished event"
        last = responses.MessageDelta(
            delta=responses.end_of(finished, self._group),
            usage=responses.usage_of(self._group, self._envelope.block_tokens),
            warnings=self._envelope.all_warnings(self._blocks.warnings),
            timings=timings_of_group(self._group),
        )
        return self._opening() + frame(last) + frame(responses.MessageStop())

    def failed(self, fault: HTTPFault) -> bytes:
        return frame(responses.error_answer(fault, self._envelope.request_id))

    def _opening(self) -> bytes:
        """Return `message_start` and the first `ping`; b"" after the first call."""
        if self._has_started:
            return b""
        self._has_started = True
        self._on_start()
        return frame(responses.MessageStart(self._envelope.message_at_start(self._group))) + PING


class _BlockFrames:
    """The `BlockSink` that collects the frames of blocks."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._index = 0
        self._make_delta = _DELTAS["text"]

    def pop(self) -> bytes:
        """Return the frames since the last call."""
        frames = b"".join(self._frames)
        self._frames.clear()
        return frames

    def start(self, index: int, kind: BlockKind, call: ToolCall | None) -> None:
        self._index = index
        self._make_delta = _DELTAS[kind]
        self._add(responses.ContentBlockStart(index, content_block(kind, call)))

    def block_delta(self, text: str) -> None:
        self._add(responses.ContentBlockDelta(self._index, self._make_delta(text)))

    def stop(self, signature: str | None) -> None:
        if signature is not None:
            delta = responses.SignatureDelta(signature)
            self._add(responses.ContentBlockDelta(self._index, delta))
        self._add(responses.ContentBlockStop(self._index))

    def _add(self, event: responses.StreamEvent) -> None:
        self._frames.append(frame(event))


class _BlockCollector:
    """The `BlockSink` that collects complete blocks."""

    def __init__(self) -> None:
        self.content: list[responses.ContentBlock] = []
        self._kind: BlockKind = "text"
        self._call: ToolCall | None = None
        self._deltas: list[str] = []

    def start(self, index: int, kind: BlockKind, call: ToolCall | None) -> None:
        self._kind, self._call, self._deltas = kind, call, []

    def block_delta(self, text: str) -> None:
        self._deltas.append(text)

    def stop(self, signature: str | None) -> None:
        text = "".join(self._deltas)
        self.content.append(content_block(self._kind, self._call, text, signature or ""))


def whole_message(
    group: ChoiceGroup, events: Iterable[Event], envelope: AnthropicEnvelope
) -> bytes:
    """Return the complete message of a group that ended without an error, as JSON. `events` are
    all events of its one choice."""
    collector = _BlockCollector()
    blocks = ContentBlocks(collector, shows_thinking=envelope.shows_thinking)
    for event in events:
        blocks.push(event)
    assert blocks.finished is not None
    return encode(envelope.message(group, collector.content, blocks.finished, blocks.warnings))
