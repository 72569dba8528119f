"""Events of one answer, in order: the interface between model formats and APIs.

A format parser turns text into events, and an API turns events into its JSON. Neither depends on
the other. Neighbouring events of the same kind are pieces of one thing: joining their texts
(`merged`) gives the whole answer. `Finished` or `Failed` comes exactly once, as the last event.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from protocol.errors import ErrorInfo
from protocol.messages import TokenLogprobs


class Content(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A piece of the answer's text."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A piece of the model's reasoning."""

    text: str


class ToolCall(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The start of a call. `index` counts the calls of this answer from 0; `id` is unique to the
    call.
    """

    index: int
    id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A piece of the JSON text of the arguments of call `index`."""

    index: int
    fragment: str


class ToolCallEnd(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The end of call `index`: the model has written all of it. A call that was cut off has no
    end.
    """

    index: int


class OutputWarning(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A defect of the answer, and how it was handled."""

    code: str
    message: str


class Finished(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The end of the answer.

    `stop_reason` is the stop string that ended it, or the stop token if the request named that
    token.
    """

    reason: str
    stop_reason: str | int | None = None


class Failed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The end of the answer, because the engine failed."""

    error: ErrorInfo


Event = (
    Content | Reasoning | ToolCall | ToolArguments | ToolCallEnd | OutputWarning | Finished | Failed
)


class OutputDelta(msgspec.Struct, frozen=True):
    """New events of one choice, and the tokens they are made of.

    A token whose text is still held back travels with the delta that releases the text. So tokens
    and text stay in step, and no token is lost: the last delta has all that are left. If the client
    requested no text (`output.tokens`), tokens come without events.
    """

    events: list[Event] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    #: Tokens that arrived together with the end of the answer and come after it. They are not part
    #: of the answer.
    num_behind: int = 0

    def __bool__(self) -> bool:
        return bool(self.events or self.token_ids)


def merged(events: Iterable[Event]) -> list[Event]:
    """Return the same answer in as few events as possible: the fold of a stream."""
    whole: list[Event] = []
    runs: list[list[str]] = []
    for event in events:
        bit = _bit(event)
        if bit is not None and whole and _continues(whole[-1], event):
            runs[-1].append(bit)
        else:
            whole.append(event)
            runs.append([bit] if bit is not None else [])
    return [with_text(e, "".join(run)) if run else e for e, run in zip(whole, runs, strict=True)]


def _bit(event: Event) -> str | None:
    match event:
        case Content(text) | Reasoning(text):
            return text
        case ToolArguments(_, fragment):
            return fragment
    return None


def _continues(before: Event, event: Event) -> bool:
    if isinstance(before, ToolArguments) and isinstance(event, ToolArguments):
        return before.index == event.index
    return type(before) is type(event)


def with_text(event: Event, text: str) -> Event:
    """Return an event with text, with another text."""
    if isinstance(event, ToolArguments):
        return ToolArguments(event.index, text)
    assert isinstance(event, Content | Reasoning)  # for others there is no text: see _bit
    return type(event)(text)
