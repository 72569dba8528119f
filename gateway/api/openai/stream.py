"""Turns an answer into OpenAI's chunks. They are streamed, or folded into one response.

    [role chunk per choice]  [chunk ...]  [finish chunk per choice]  [usage, timings]  [DONE]

A chunk has a delta of content or reasoning, the head of a tool call (id and name, no arguments
yet), or a delta of a call's arguments. The chunks of several choices interleave.

- A completion's finish reason is in the chunk of its last text. A chat's has its own chunk.
- The warnings of a choice are in the chunk of its finish reason.
- The first chunks (a chat's role, an echoed prompt) are sent with the first token. If they were
  sent earlier, clients would measure a time to first token that is too short.
- After an error, one `{"error": ...}` event and [DONE] close the stream.
- Chunks that differ only in their text and logprobs are encoded once, as a template of bytes. Later
  texts and logprobs are inserted into the template.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict, Unpack

import msgspec
from msgspec import UNSET

from gateway.api.openai.requests import GenerationBody, includes_usage, repeats_usage
from gateway.api.openai.response_builder import Members, OpenAIEnvelope, ResponseBuilder
from gateway.api.openai.responses import AnswerWarning, error_body, usage_of, usage_of_choice
from gateway.formats.events import (
    Content,
    Event,
    Failed,
    Finished,
    OutputDelta,
    OutputWarning,
    Reasoning,
    ToolArguments,
    ToolText,
    merged,
    with_text,
)
from gateway.generation.frame_sink import FrameDestination, FrameSink
from gateway.generation.group import ChoiceGroup
from gateway.generation.request import Choice
from gateway.generation.sinks import CollectSink
from gateway.http import sse
from gateway.http.errors import HTTPFault
from gateway.observe.timings import timings_of_group

encode = msgspec.json.encode
TemplateKey = tuple[int, type[Event], int]
"""(index of the choice, type of the event, index of the tool call)"""
_SENT = OutputDelta()
"""Replaces a delta after its tokens were sent with a chunk."""
_HOLE, _LOGPROBS_HOLE = "\0", "\1"
"""Placeholders for the text and the logprobs in a template."""
MAX_TEMPLATES = 1 << 10
"""Maximum number of templates that a stream keeps. When it is reached, all of them are dropped."""


@dataclass(frozen=True, slots=True)
class ChunkTemplate:
    """The frame of a chunk that contains only text, and logprobs if they were requested."""

    #: The frame, cut where the text is inserted, up to the logprobs or to its end.
    around_text: list[bytes]
    #: The rest of the frame, after the logprobs. None: chunks have no logprobs.
    after_logprobs: bytes | None


class ChunkStreamState(msgspec.Struct):
    """The state of a stream as plain data, so that another process can continue the stream."""

    #: Whether the first chunks were returned.
    has_started: bool = False
    #: Index of a choice -> the warnings to send with its finish chunk.
    warnings: dict[int, list[OutputWarning]] = {}
    #: Index of a choice -> number of tokens sent. Counted only if each chunk has a usage.
    num_tokens: dict[int, int] = {}


class ChunkOptions(TypedDict, total=False):
    """Options of a stream that the client sets."""

    #: Before [DONE], send a chunk with the total usage. All other chunks have `"usage":null`.
    includes_usage: bool
    #: Add to each chunk the usage so far of the chunk's choice.
    repeats_usage: bool
    #: Add token ids to each chunk, and the prompt's token ids to the first chunk.
    includes_ids: bool


def chunk_options(body: GenerationBody) -> ChunkOptions:
    return {
        "includes_usage": includes_usage(body.stream_options),
        "repeats_usage": repeats_usage(body.stream_options),
        "includes_ids": bool(body.return_token_ids),
    }


class AnswerChunks:
    """Turns the deltas of one answer into chunks, in order.

    state  the state of the stream that is continued; None starts a new stream
    """

    def __init__(
        self,
        group: ChoiceGroup,
        builder: ResponseBuilder,
        envelope: OpenAIEnvelope,
        *,
        state: ChunkStreamState | None = None,
        **options: Unpack[ChunkOptions],
    ) -> None:
        self._group = group
        self._builder = builder
        self._envelope = envelope
        self._includes_usage = options.get("includes_usage", False)
        self._repeats_usage = options.get("repeats_usage", False)
        self._includes_ids = options.get("includes_ids", False)
        self._new_chunk = partial(builder.chunk, **envelope.head)
        self.state = state or ChunkStreamState()
        #: Whether chunks contain no token ids and no usage so far.
        self.is_regular = not (self._repeats_usage or self._includes_ids)
        #: Whether they contain no logprobs either.
        self.is_plain = self.is_regular and builder.num_logprobs is None

    def start(self) -> list[Any]:
        """Return the first chunk of each choice; nothing if they were returned before."""
        if self.state.has_started:
            return []
        self.state.has_started = True
        return list(filter(None, map(self._opening, self._group.choices)))

    def push(self, choice: Choice, delta: OutputDelta) -> list[Any]:
        """Return the chunks of `delta`, after the first chunks of the stream if those were not
        returned yet."""
        events, builder = delta.events, self._builder
        if events and isinstance(events[0], Failed):  # the error is sent by `ChunkStream.fail`
            return []
        chunks = self.start()
        self.count(choice, delta)
        parts = [part for event in events if (part := self._part(choice, event)) is not None]
        end = events[-1] if events and isinstance(events[-1], Finished) else None
        last = parts.pop() if parts and end and builder.ends_with_text else builder.empty
        if not (parts or end or self.is_plain):  # no text yet, but tokens
            parts.append(builder.empty)
        for part in parts:
            logprobs = builder.logprobs(choice, delta)
            chunks.append(self.chunk(choice, part | self._ids(delta), logprobs))
            delta = _SENT
        if end is not None:
            chunks.append(self._finish_chunk(choice, end, last, delta))
        return chunks

    def _part(self, choice: Choice, event: Event) -> Members | None:
        """Return what an event adds to the choice in a chunk, or None. Warnings are kept for the
        finish chunk."""
        if isinstance(event, OutputWarning):
            self.state.warnings.setdefault(choice.index, []).append(event)
            return None
        return self._builder.part(event)

    def count(self, choice: Choice, delta: OutputDelta) -> None:
        """Count the tokens of `delta` as sent. A chunk's usage counts only sent tokens, although
        more may have been generated."""
        if self._repeats_usage and delta.token_ids:
            counts = self.state.num_tokens
            counts[choice.index] = counts.get(choice.index, 0) + len(delta.token_ids)

    def end(self) -> Any:
        """Return the last chunk, or None if it would be empty."""
        timings = timings_of_group(self._group)
        usage = usage_of(self._group) if self._includes_usage else UNSET
        if timings is UNSET and usage is UNSET:
            return None
        return self._new_chunk(choices=[], usage=usage, timings=timings)

    def _opening(self, choice: Choice) -> Any:
        """Return the first chunk of a choice, or None if there is nothing to send before text."""
        part, top = self._builder.opening(choice), Members()
        if not choice.index:  # members about the request are sent once
            top |= self._envelope.extensions
        if part is None:
            if not (self._includes_ids or top):
                return None
            part = self._builder.empty
        if self._includes_ids:
            ids = {"prompt_token_ids": choice.prompt_request.prompt_ids}
            part, top = (part, top | ids) if self._builder.prompt_ids_on_top else (part | ids, top)
        return self.chunk(choice, part, self._builder.echo_logprobs(choice), top)

    def _finish_chunk(
        self, choice: Choice, end: Finished, part: Members, delta: OutputDelta
    ) -> Any:
        """Return the finish chunk. If no earlier chunk has the tokens of `delta`, this one has
        them."""
        logprobs = None if delta is _SENT else self._builder.logprobs(choice, delta)
        part = part | {"finish_reason": end.reason, "stop_reason": end.stop_reason}
        warnings = self.state.warnings.pop(choice.index, ())
        listed = [AnswerWarning.from_event(warning, choice.index) for warning in warnings]
        top = {"warnings": listed} if listed else {}
        return self.chunk(choice, part | self._ids(delta), logprobs, top)

    def _ids(self, delta: OutputDelta) -> Members:
        return {"token_ids": delta.token_ids} if self._includes_ids else {}

    def chunk(
        self, choice: Choice, part: Members, logprobs: Any = None, top: Members | None = None
    ) -> Any:
        """Return a chunk with one choice. `part` has members of that choice, `top` of the chunk."""
        usage: Any = None if self._includes_usage else UNSET
        if self._repeats_usage:
            num_tokens = self.state.num_tokens.get(choice.index, 0)
            usage = usage_of_choice(self._group, choice, num_tokens)
        part = {"index": choice.index, "logprobs": logprobs, "finish_reason": None, **part}
        return self._new_chunk(
            choices=[self._builder.chunk_choice(**part)], usage=usage, **(top or {})
        )


# ---- the stream, the whole response


class ChunkStream(FrameSink):
    """The sink that writes one answer as OpenAI's chunks."""

    def __init__(
        self,
        group: ChoiceGroup,
        destination: FrameDestination,
        builder: ResponseBuilder,
        envelope: OpenAIEnvelope,
        **options: Unpack[ChunkOptions],
    ) -> None:
        super().__init__(group, destination)
        self._builder = builder
        self._chunks = AnswerChunks(group, builder, envelope, **options)
        self._templates: dict[TemplateKey, ChunkTemplate] = {}

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        """Write a delta of text with a template, and any other delta with `frames`."""
        if len(delta.events) == 1:
            event, index = delta.events[0], 0
            text: str | None = None
            if type(event) is Content or type(event) is Reasoning:
                text = event.text
            elif isinstance(event, ToolArguments | ToolText):
                index, text = event.index, event.fragment
            if text is not None:
                key = choice.index, type(event), index
                template = self._templates.get(key) or self._new_template(key, choice, event)
                if template is not None:
                    frame = encode(text).join(template.around_text)
                    if template.after_logprobs is not None:
                        logprobs = self._builder.logprobs(choice, delta)
                        frame += encode(logprobs) + template.after_logprobs
                    self._write(frame)
                    return
        super().delta(choice, delta)

    def frames(self, choice: Choice, delta: OutputDelta) -> bytes:
        return b"".join([sse.frame(encode(chunk)) for chunk in self._chunks.push(choice, delta)])

    def _new_template(self, key: TemplateKey, choice: Choice, event: Event) -> ChunkTemplate | None:
        """Return the template of a chunk with an event like `event`. Return None if the next chunk
        must contain anything other than text and logprobs."""
        if not (self._chunks.is_regular and self._chunks.state.has_started):
            return None
        part = self._builder.part(with_text(event, _HOLE))
        assert part is not None, "an answer has only events that its API sends"
        has_logprobs = self._builder.num_logprobs is not None
        logprobs = _LOGPROBS_HOLE if has_logprobs else None
        frame = sse.frame(encode(self._chunks.chunk(choice, part, logprobs)))
        after_logprobs = None
        if has_logprobs:  # they follow the text
            frame, after_logprobs = frame.rsplit(encode(_LOGPROBS_HOLE), 1)
        around_text = frame.rsplit(encode(_HOLE), 2 if type(event) is Reasoning else 1)
        if len(self._templates) >= MAX_TEMPLATES:
            self._templates.clear()
        template = self._templates[key] = ChunkTemplate(around_text, after_logprobs)
        return template

    def closing(self) -> bytes:
        last = self._chunks.end()
        return (b"" if last is None else sse.frame(encode(last))) + sse.DONE

    def failed(self, fault: HTTPFault) -> bytes:
        return sse.frame(error_body(fault)) + sse.DONE


def whole_response(
    group: ChoiceGroup,
    collected: CollectSink,
    builder: ResponseBuilder,
    envelope: OpenAIEnvelope,
    *,
    includes_ids: bool = False,
    prompt_logprobs: Callable[[Choice], list[Any] | None] | None = None,
) -> bytes:
    """Return the complete response: the joined chunks of a group that ended without an error.

    collected        the output of each choice
    includes_ids     add the token ids of prompt and answer
    prompt_logprobs  builds a choice's prompt logprobs; None: not requested
    """
    chunks = AnswerChunks(group, builder, replace(envelope, extensions={}))
    pieces: list[list[Any]] = [[] for _ in group.choices]
    warnings: list[AnswerWarning] = []
    for choice in group.choices:
        delta = collected.whole[choice.index]
        delta = OutputDelta(merged(delta.events), delta.token_ids, delta.logprobs)
        for chunk in chunks.push(choice, delta):
            warnings += chunk.warnings or ()
            for piece in chunk.choices:
                pieces[piece.index].append(piece)
    choices: list[Any] = []
    top: Members = {"warnings": warnings} if warnings else {}
    for choice, own in zip(group.choices, pieces, strict=True):
        finish = {"finish_reason": own[-1].finish_reason, "stop_reason": own[-1].stop_reason}
        members = {"index": choice.index, **builder.fold(choice, own), **finish}
        if includes_ids:
            members["token_ids"] = collected.whole[choice.index].token_ids
        if choice.index == 0 or not builder.prompt_ids_on_top:
            where = top if builder.prompt_ids_on_top else members
            where["prompt_token_ids"] = choice.prompt_request.prompt_ids if includes_ids else None
            where["prompt_logprobs"] = prompt_logprobs(choice) if prompt_logprobs else None
        choices.append(builder.whole_choice(**members))
    top |= {**envelope.head, "choices": choices, "usage": usage_of(group)}
    top["timings"] = timings_of_group(group)
    return encode(builder.whole(**top, **envelope.extensions))
