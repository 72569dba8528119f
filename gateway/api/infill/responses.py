"""Response bodies of /infill in llama.cpp's shape, streamed or whole.

A stream has a chunk for each delta with text or tokens: tokens without text, such as the end token,
have an empty `content`. Its last event has an empty `content`, `stop: true`, and the
members of a whole answer. There is no [DONE].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.openai.responses import AnswerWarning, error_body
from gateway.formats.events import Content, Finished, OutputDelta
from gateway.generation.frame_sink import FrameDestination, FrameSink
from gateway.generation.group import ChoiceGroup
from gateway.generation.request import Choice
from gateway.generation.sinks import CollectSink
from gateway.http import sse
from gateway.http.errors import HTTPFault
from gateway.observe.timings import Timings, timings_of_group

encode = msgspec.json.encode
StopType = Literal["eos", "word", "limit", "none"]


class InfillChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A delta of the text.

    tokens_evaluated, tokens_predicted  prompt tokens, and tokens generated so far
    """

    index: Literal[0]
    content: str
    tokens: list[int]
    stop: Literal[False]
    tokens_predicted: int
    tokens_evaluated: int


class InfillAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer, or the last event of a stream.

    tokens          the token ids of `content`, if requested
    stop_type       eos: an end token; word: a stop string; limit: n_predict or the context; none:
                    the request was aborted
    stopping_word   the stop string; empty if there was none
    has_new_line    whether the text contains a line break
    tokens_cached   prompt tokens found in the prefix cache
    truncated       whether files of `input_extra` were left out
    ignored_params  request fields that had no effect
    """

    index: Literal[0]
    content: str
    tokens: list[int]
    stop: Literal[True]
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    has_new_line: bool
    truncated: bool
    stop_type: StopType
    stopping_word: str
    timings: Timings | UnsetType
    ignored_params: list[str] | UnsetType = UNSET
    warnings: list[AnswerWarning] | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class InfillEnvelope:
    """The members of an answer that do not depend on its text, and the options of the request."""

    model: str
    truncated: bool
    returns_tokens: bool
    #: Members to return; empty: all.
    response_fields: Sequence[str] = ()
    extensions: Mapping[str, Any] = field(default_factory=dict)

    def answer(
        self,
        group: ChoiceGroup,
        finished: Finished,
        content: str,
        tokens: list[int],
        *,
        has_new_line: bool,
    ) -> bytes:
        """Return the complete answer as JSON."""
        tokens = tokens if self.returns_tokens else []
        members = self._members(group, finished, content, tokens, has_new_line=has_new_line)
        answer = self._struct(members)
        if not self.response_fields:
            return encode(answer)
        return encode(selected(msgspec.to_builtins(answer), self.response_fields))

    def whole(self, answer: OutputDelta) -> InfillEnvelope:
        """Return the envelope of the whole answer, which is not streamed."""
        return self

    def chunk(self, delta: OutputDelta, members: Mapping[str, Any]) -> msgspec.Struct:
        """Return the event of a delta. `members` are those of an `InfillChunk`."""
        return InfillChunk(**members)

    def _struct(self, members: Mapping[str, Any]) -> msgspec.Struct:
        """Return the answer with these members."""
        return InfillAnswer(**members)

    def _members(
        self,
        group: ChoiceGroup,
        finished: Finished,
        content: str,
        tokens: list[int],
        *,
        has_new_line: bool,
    ) -> dict[str, Any]:
        warning = group.choices[0].warning
        word = finished.stop_reason if isinstance(finished.stop_reason, str) else ""
        return {
            "index": 0,
            "content": content,
            "tokens": tokens,
            "stop": True,
            "model": self.model,
            "tokens_predicted": group.num_generated_tokens,
            "tokens_evaluated": group.num_prompt_tokens,
            "tokens_cached": group.num_cached_tokens,
            "has_new_line": has_new_line,
            "truncated": self.truncated,
            "stop_type": _stop_type(finished.reason, word),
            "stopping_word": word,
            "timings": timings_of_group(group),
            "warnings": UNSET if warning is None else [AnswerWarning.from_event(warning, 0)],
            **self.extensions,
        }


def _stop_type(reason: str, word: str) -> StopType:
    if reason == "length":
        return "limit"
    if reason != "stop":
        return "none"
    return "word" if word else "eos"


def selected(answer: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return the members of `answer` at these paths, each under its whole path. "a/b" is the member
    `b` of the member `a`. Paths that do not exist are left out."""
    found: dict[str, Any] = {}
    for path in paths:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name, UNSET) if isinstance(value, Mapping) else UNSET
        if value is not UNSET:
            found[path] = value
    return found


class InfillStream(FrameSink):
    """The sink that writes one answer as llama.cpp's events."""

    def __init__(
        self, group: ChoiceGroup, destination: FrameDestination, envelope: InfillEnvelope
    ) -> None:
        super().__init__(group, destination)
        self._envelope = envelope
        self._num_tokens = 0
        self._has_new_line = False
        self._finished: Finished | None = None

    def frames(self, choice: Choice, delta: OutputDelta) -> bytes:
        text = text_of(delta)
        self._num_tokens += len(delta.token_ids)
        self._has_new_line = self._has_new_line or "\n" in text
        if delta.events and isinstance(delta.events[-1], Finished):
            self._finished = delta.events[-1]
        if not text and not delta.token_ids:
            return b""
        members = {
            "index": 0,
            "content": text,
            "tokens": delta.token_ids,
            "stop": False,
            "tokens_predicted": self._num_tokens,
            "tokens_evaluated": self._group.num_prompt_tokens,
        }
        return sse.frame(encode(self._envelope.chunk(delta, members)))

    def closing(self) -> bytes:
        assert self._finished is not None, "an answer that has ended has a Finished event"
        last = self._envelope.answer(
            self._group, self._finished, "", [], has_new_line=self._has_new_line
        )
        return sse.frame(last)

    def failed(self, fault: HTTPFault) -> bytes:
        return sse.frame(error_body(fault))


def text_of(delta: OutputDelta) -> str:
    return "".join(event.text for event in delta.events if isinstance(event, Content))


def whole_infill(group: ChoiceGroup, collected: CollectSink, envelope: InfillEnvelope) -> bytes:
    """Return the whole answer of a group that ended without an error, as JSON."""
    whole = collected.whole[0]
    finished, text = whole.events[-1], text_of(whole)
    assert isinstance(finished, Finished)
    return envelope.whole(whole).answer(
        group, finished, text, whole.token_ids, has_new_line="\n" in text
    )
