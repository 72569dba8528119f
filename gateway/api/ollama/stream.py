"""Writes an answer as Ollama's records: one line for each delta, or one record for the whole.

- A tool call is written when it is complete, with its arguments as an object. A call that was cut
  off is closed at the end of the answer.
- The last record has `done: true`, the usage and the times. It has no text if the answer is
  streamed.
- After an error, one line `{"error": ...}` ends the stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
from msgspec import UNSET

from gateway.api.anthropic.blocks import ToolInput
from gateway.api.ollama.responses import (
    AnswerLine,
    AnswerMessage,
    CalledFunction,
    OllamaChatAnswer,
    OllamaGenerated,
    OllamaToolCall,
    RecordWarning,
    encode,
    error_body,
    last_members,
    timestamp,
)
from gateway.formats.events import (
    Content,
    Event,
    Finished,
    OutputDelta,
    OutputWarning,
    Reasoning,
    ToolArguments,
    ToolCall,
    ToolCallEnd,
)
from gateway.generation.frame_sink import FrameDestination, FrameSink
from gateway.generation.group import ChoiceGroup
from gateway.generation.request import Choice
from gateway.generation.sinks import CollectSink
from gateway.http.errors import HTTPFault
from gateway.text.logprobs import chat_logprobs
from gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OllamaEnvelope:
    """The members of an answer's records other than its text."""

    #: The model name from the request.
    model: str
    tokenizer: Tokenizer
    #: Whether this is an answer of /api/generate.
    is_generated: bool = False
    #: Whether the last record has the token ids of prompt and answer.
    has_context: bool = False
    #: Number of most likely tokens in logprobs; None: no logprobs.
    num_logprobs: int | None = None
    #: Time that the request has waited for its model.
    waited_s: float = 0.0

    def line(self, part: AnswerPart, **members: Any) -> AnswerLine:
        """Return a record with the content of `part`."""
        return new_record(self.model, part, is_generated=self.is_generated, **members)

    def last(self, group: ChoiceGroup, reader: PartReader, part: AnswerPart) -> AnswerLine:
        """Return the last record."""
        assert reader.finished is not None, "an answer that has ended has a Finished event"
        members = last_members(group, reader.finished, self.waited_s)
        if reader.warnings:
            members["warnings"] = reader.warnings
        if self.has_context:
            prompt_ids = group.choices[0].prompt_request.prompt_ids
            members["context"] = [*prompt_ids, *reader.token_ids]
        return self.line(part, **members)

    def logprobs(self, delta: OutputDelta) -> dict[str, Any]:
        if self.num_logprobs is None or not delta.logprobs:
            return {}
        found = chat_logprobs(self.tokenizer, delta.logprobs, num_top=self.num_logprobs)
        return {"logprobs": found}


@dataclass(slots=True)
class AnswerPart:
    """Text, thinking and complete calls of an answer, or of one delta of it."""

    text: str = ""
    thinking: str = ""
    calls: list[OllamaToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.calls)


def new_record(
    model: str, part: AnswerPart, *, is_generated: bool, **members: Any
) -> OllamaGenerated | OllamaChatAnswer:
    """Return a line of a response, with the content of `part` and with `members`. It is one of
    /api/generate if `is_generated`, otherwise one of /api/chat."""
    thinking, calls = part.thinking or UNSET, part.calls or UNSET
    common = {"model": model, "created_at": timestamp(), "done": False, **members}
    if is_generated:
        return OllamaGenerated(response=part.text, thinking=thinking, tool_calls=calls, **common)
    message = AnswerMessage(
        role="assistant", content=part.text, thinking=thinking, tool_calls=calls
    )
    return OllamaChatAnswer(message=message, **common)


class PartReader:
    """Turns the events of one answer into parts. `keeps_ids`: collect the token ids, too."""

    def __init__(self, *, keeps_ids: bool) -> None:
        self.finished: Finished | None = None
        self.warnings: list[RecordWarning] = []
        self.token_ids: list[int] = []
        self._keeps_ids = keeps_ids
        self._call: ToolCall | None = None
        self._arguments: list[str] = []
        self._input = ToolInput()

    def part(self, delta: OutputDelta) -> AnswerPart:
        """Return what `delta` adds to the answer."""
        text: list[str] = []
        thinking: list[str] = []
        part = AnswerPart()
        for event in delta.events:
            if isinstance(event, Content):
                text.append(event.text)
            elif isinstance(event, Reasoning):
                thinking.append(event.text)
            else:
                self._push(event, part)
        if self._keeps_ids:
            self.token_ids += delta.token_ids
        part.text, part.thinking = "".join(text), "".join(thinking)
        return part

    def _push(self, event: Event, part: AnswerPart) -> None:
        match event:
            case ToolCall():
                self._end_call(part, complete=False)
                self._call, self._arguments, self._input = event, [], ToolInput()
            case ToolArguments(_, fragment):
                self._arguments.append(self._input.push(fragment))
            case ToolCallEnd():
                self._end_call(part, complete=True)
            case OutputWarning(code, message):
                self.warnings.append(RecordWarning(code=code, message=message))
            case Finished():
                self._end_call(part, complete=False)
                self.finished = event

    def _end_call(self, part: AnswerPart, *, complete: bool) -> None:
        """Add the open call to `part`, if there is one. Its arguments are always an object."""
        if self._call is None:
            return
        text = "".join([*self._arguments, self._input.finish(complete=complete)])
        arguments = cast("dict[str, Any]", msgspec.Raw(text.encode() or b"{}"))
        function = CalledFunction(index=self._call.index, name=self._call.name, arguments=arguments)
        part.calls.append(OllamaToolCall(id=self._call.id, function=function))
        self._call = None


class LineWriter(FrameSink):
    """The sink that writes one answer as lines."""

    def __init__(
        self, group: ChoiceGroup, destination: FrameDestination, envelope: OllamaEnvelope
    ) -> None:
        super().__init__(group, destination)
        self._envelope = envelope
        self._reader = PartReader(keeps_ids=envelope.has_context)

    def frames(self, choice: Choice, delta: OutputDelta) -> bytes:
        part = self._reader.part(delta)
        logprobs = self._envelope.logprobs(delta)
        if not (part or logprobs):
            return b""
        return encode(self._envelope.line(part, **logprobs)) + b"\n"

    def closing(self) -> bytes:
        return encode(self._envelope.last(self._group, self._reader, AnswerPart())) + b"\n"

    def failed(self, fault: HTTPFault) -> bytes:
        return error_body(fault) + b"\n"


def whole_record(group: ChoiceGroup, collected: CollectSink, envelope: OllamaEnvelope) -> bytes:
    """Return the record of a group that ended without an error, as JSON."""
    whole = collected.whole[0]
    reader = PartReader(keeps_ids=envelope.has_context)
    record = envelope.last(group, reader, reader.part(whole))
    return encode(msgspec.structs.replace(record, **envelope.logprobs(whole)))
