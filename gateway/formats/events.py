"""The one vocabulary between model formats and APIs: what an answer says, in order.

A format turns text into these, an API turns these into its JSON; neither knows the other. Pieces of
the same kind that follow each other are one thing, told bit by bit: joining their texts (`merged`)
is the whole answer. `Finished` or `Failed` comes exactly once and last.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from protocol.errors import ErrorInfo
from protocol.messages import TokenLogprobs


class Content(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A bit of the answer's text."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A bit of the model's thinking aloud."""

    text: str


class ToolCall(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A call begins. `index` counts the calls of this answer from 0; `id` is unique to the call."""

    index: int
    id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A bit of the JSON text of call `index`'s arguments."""

    index: int
    fragment: str


class ToolCallEnd(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Call `index` is complete: the model has written all of it. A call that was cut off has no
    end."""

    index: int


class OutputWarning(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Something about the answer that is not as it should be, and how it was told all the same."""

    code: str
    message: str


class Finished(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The end. `stop_reason` is the stop string, or the stop token the request named, that ended
    it."""

    reason: str
    stop_reason: str | int | None = None


class Failed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The end: the engine could not go on."""

    error: ErrorInfo


Event = (
    Content | Reasoning | ToolCall | ToolArguments | ToolCallEnd | OutputWarning | Finished | Failed
)


class OutputDelta(msgspec.Struct, frozen=True):
    """News of one choice: events, and the tokens they are made of.

    A token whose text is still held back travels with the delta that releases it, so tokens and
    text stay in step, and no token is ever lost: the last delta brings all that are left. Where
    nobody asks for text (`output.tokens`), tokens come without events.

    num_behind   tokens that came together with the answer's end, and stand behind it: nobody has
                 said them, wherever they were cut
    """

    events: list[Event] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    num_behind: int = 0

    def __bool__(self) -> bool:
        return bool(self.events or self.token_ids)


def merged(events: Iterable[Event]) -> list[Event]:
    """The same answer with as few events as possible: the fold of a stream."""
    whole: list[Event] = []
    runs: list[list[str]] = []
    for event in events:
        bit = _bit(event)
        if bit is not None and whole and _continues(whole[-1], event):
            runs[-1].append(bit)
        else:
            whole.append(event)
            runs.append([bit] if bit is not None else [])
    return [_with_text(e, "".join(run)) if run else e for e, run in zip(whole, runs, strict=True)]


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


def _with_text(event: Event, text: str) -> Event:
    if isinstance(event, ToolArguments):
        return ToolArguments(event.index, text)
    assert isinstance(event, Content | Reasoning)  # for others there is no text: see _bit
    return type(event)(text)
