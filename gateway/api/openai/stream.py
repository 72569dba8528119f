"""Writes an answer as a stream of chunks, in OpenAI's order.

    [role chunk per choice]  [chunk ...]  [finish chunk per choice]  [usage, timings]  [DONE]

A chunk has a delta of content or reasoning, the head of a tool call (id and name, no arguments
yet), or a delta of its arguments. The chunks of several choices interleave.

- A completion's finish reason comes with its last text; a chat's has its own chunk.
- Warnings come with the finish reason of their choice.
- The first chunks (a chat's role, an echoed prompt) are sent with the first token. Sent earlier,
  they would make the time to first token look shorter than it is.
- After an error, one `{"error": ...}` event and [DONE] close the stream.
- Most of a chunk's JSON is encoded once per stream. Usually only the new text is encoded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from gateway.api.openai.errors import error_body
from gateway.api.openai.message import warning_of
from gateway.api.openai.response_builder import (
    OpenAIEnvelope,
    ResponseBuilder,
    encode,
    usage_of,
    usage_of_choice,
)
from gateway.formats.events import (
    Content,
    Event,
    Failed,
    Finished,
    OutputDelta,
    OutputWarning,
    Reasoning,
    ToolArguments,
)
from gateway.generation.choice import Choice
from gateway.generation.group import ChoiceGroup
from gateway.http import sse
from gateway.http.errors import fault_of
from gateway.observe.timings import told_timings
from protocol.errors import ServingError


class ChunkStreamState(msgspec.Struct):
    """The state of a ChunkStream: plain data, so that another process can continue the stream.

    has_started   the first chunks were written
    warnings    choice -> warnings to send with its finish chunk
    num_tokens  choice -> number of tokens sent; counted only if each chunk has a usage
    """

    has_started: bool = False
    warnings: dict[int, list[OutputWarning]] = {}
    num_tokens: dict[int, int] = {}


class ChunkStream:
    """The sink that writes one answer as chunks.

    write            receives each frame
    finish           called after the last frame
    includes_usage   send a chunk with the total usage before [DONE], `"usage":null` in the others
    repeats_usage    add the usage so far of its choice to each chunk
    includes_ids     add token ids to each chunk, and prompt ids to the first
    state            the state of the stream to continue; None starts a new one
    """

    def __init__(
        self,
        group: ChoiceGroup,
        builder: ResponseBuilder,
        envelope: OpenAIEnvelope,
        *,
        write: Callable[[bytes], None],
        finish: Callable[[], None],
        includes_usage: bool = False,
        repeats_usage: bool = False,
        includes_ids: bool = False,
        state: ChunkStreamState | None = None,
    ) -> None:
        self._group = group
        self._builder = builder
        self._write = write
        self._finish = finish
        self._includes_usage = includes_usage
        self._repeats_usage = repeats_usage
        self._includes_ids = includes_ids
        self._envelope = envelope
        self.state = state or ChunkStreamState()
        self._is_plain = not (repeats_usage or includes_ids or builder.num_logprobs is not None)
        shared = encode(envelope.fields(builder.chunk_kind, builder.constants))[:-1]
        self._head = b"data: " + shared + b',"choices":['
        self._heads = [self._head + b'{"index":%d,' % c.index for c in group.choices]
        usage = b',"usage":null' if includes_usage else b""
        self._plain_tail = b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        events = delta.events
        if len(events) == 1 and self._is_plain and self.state.has_started:
            members = self._plain_members(events[0])
            if members is not None:  # the common case
                self._write(self._heads[choice.index] + members + self._plain_tail)
                return
        if events and isinstance(events[0], Failed):  # `fail` sends the error
            return
        frames = self._openings()
        num_openings = len(frames)
        self.count(choice, delta)
        members_list = [
            m for m in (self._members(choice, event) for event in events) if m is not None
        ]
        end = events[-1] if events else None
        ending = self._builder.empty()
        if members_list and type(end) is Finished and self._builder.ends_with_text:
            ending = members_list.pop()
        for members in members_list:
            frames.append(self._delta_chunk(choice, members, delta))
            delta = _SENT
        if type(end) is Finished:
            frames.append(self._finish_chunk(choice, end, delta, ending))
        if len(frames) == num_openings and not self._is_plain:  # no text yet, but tokens
            frames.append(self._delta_chunk(choice, self._builder.empty(), delta))
        if frames:
            self._write(b"".join(frames) if len(frames) > 1 else frames[0])

    def count(self, choice: Choice, delta: OutputDelta) -> None:
        """Count the tokens of `delta` as sent. A chunk's usage covers the text sent so far, which
        may lag behind the tokens generated."""
        if self._repeats_usage and delta.token_ids:
            counts = self.state.num_tokens
            counts[choice.index] = counts.get(choice.index, 0) + len(delta.token_ids)

    def start(self) -> None:
        """Write the first chunks now, instead of with the first delta."""
        if frames := self._openings():
            self._write(b"".join(frames))

    def _openings(self) -> list[bytes]:
        if self.state.has_started:
            return []
        self.state.has_started = True
        return list(filter(None, map(self._opening, self._group.choices)))

    def _plain_members(self, event: Event) -> bytes | None:
        """Return the members for an event that can be sent as it is, else None."""
        if type(event) is Content:
            return self._builder.content(event.text)
        return self._builder.event(event) if type(event) in _PLAIN_EVENTS else None

    def _members(self, choice: Choice, event: Event) -> bytes | None:
        """Return the members for an event, or None if nothing is sent now. Warnings wait for the
        finish chunk of their choice."""
        if type(event) is Content:
            return self._builder.content(event.text)
        if type(event) is OutputWarning:
            self.state.warnings.setdefault(choice.index, []).append(event)
            return None
        return self._builder.event(event)

    def end(self) -> None:
        more: dict[str, Any] = {}
        if self._includes_usage:
            more["usage"] = usage_of(self._group)
        more |= told_timings(self._group)
        last = self._head + b"],%b}\n\n" % encode(more)[1:-1] if more else b""
        self._write(last + sse.DONE)
        self._finish()

    def fail(self, error: ServingError) -> None:
        self._write(sse.frame(error_body(fault_of(error))) + sse.DONE)
        self._finish()

    def _opening(self, choice: Choice) -> bytes | None:
        members = self._builder.opening(choice)
        if members is None:
            if not (self._includes_ids or (self._extensions() and not choice.index)):
                return None
            members = self._builder.empty()
        logprobs = encode(self._builder.echo_logprobs(choice))
        on_top = in_choice = b""
        if self._includes_ids:
            ids = b',"prompt_token_ids":%b' % encode(choice.ask.prompt_ids)
            on_top, in_choice = (ids, b"") if self._builder.prompt_ids_on_top else (b"", ids)
        if not choice.index:
            on_top += self._extensions()
        return self._chunk(choice, members, logprobs, b"null", in_choice, on_top)

    def _extensions(self) -> bytes:
        """Return the members about the request. They are sent once."""
        extensions = dict(self._envelope.extensions)
        if self._envelope.warnings:
            extensions["warnings"] = [warning_of(w, None) for w in self._envelope.warnings]
        return b"," + encode(extensions)[1:-1] if extensions else b""

    def _delta_chunk(self, choice: Choice, members: bytes, delta: OutputDelta) -> bytes:
        if self._is_plain:
            return self._heads[choice.index] + members + self._plain_tail
        return self._chunk(
            choice, members, self._logprobs(choice, delta), b"null", self._ids(delta)
        )

    def _finish_chunk(
        self, choice: Choice, event: Finished, delta: OutputDelta, members: bytes
    ) -> bytes:
        """Return the finish chunk. It carries the tokens of `delta` if no earlier chunk did."""
        logprobs = b"null" if delta is _SENT else self._logprobs(choice, delta)
        more = self._ids(delta) + b',"stop_reason":%b' % encode(event.stop_reason)
        warnings = self.state.warnings.pop(choice.index, ())
        on_top = b""
        if warnings:
            on_top = b',"warnings":%b' % encode([warning_of(w, choice.index) for w in warnings])
        return self._chunk(choice, members, logprobs, encode(event.reason), more, on_top)

    def _logprobs(self, choice: Choice, delta: OutputDelta) -> bytes:
        return encode(self._builder.logprobs(choice, delta))

    def _ids(self, delta: OutputDelta) -> bytes:
        return b',"token_ids":%b' % encode(delta.token_ids) if self._includes_ids else b""

    def _chunk(
        self,
        choice: Choice,
        members: bytes,
        logprobs: bytes,
        reason: bytes,
        in_choice: bytes,
        on_top: bytes = b"",
    ) -> bytes:
        """Return one frame. `in_choice` and `on_top` are more members, each preceded by a comma."""
        usage = b',"usage":null' if self._includes_usage else b""
        if self._repeats_usage:
            num_tokens = self.state.num_tokens.get(choice.index, 0)
            usage = b',"usage":%b' % encode(usage_of_choice(self._group, choice, num_tokens))
        inner = b'%b,"logprobs":%b,"finish_reason":%b%b}' % (members, logprobs, reason, in_choice)
        return b"%b%b]%b%b}\n\n" % (self._heads[choice.index], inner, on_top, usage)


_PLAIN_EVENTS = (Reasoning, ToolArguments)
_SENT = OutputDelta()
"""Stands for a delta whose tokens were sent with an earlier chunk."""
