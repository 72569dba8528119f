"""Events of one answer, in order: the interface between model formats and APIs.

A format parser turns text into events, and an API turns events into its JSON. Neither depends on
the other. Neighbouring events of the same kind are pieces of one text, which `merged` joins.
`Finished` or `Failed` comes exactly once, as the last event.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.messages import FinishReason
from protocol.wire.errors import ErrorInfo

INVALID_JSON = "INVALID_JSON"
"""The member that holds the text of a call's arguments, if they must be an object and the model did
not write one. Its name is Anthropic's."""


class Content(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A piece of the answer's text."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A piece of the model's reasoning."""

    text: str


class ToolCall(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The start of a call.

    `index` counts the calls of this answer from 0. `id` is unique to the call. If `is_text`, the
    tool takes one text: `ToolText` events follow instead of `ToolArguments`.
    """

    index: int
    id: str
    name: str
    is_text: bool = False


class ToolArguments(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A piece of the JSON text of the arguments of call `index`."""

    index: int
    fragment: str


class ToolText(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A piece of the text of call `index`, whose tool takes one text."""

    index: int
    fragment: str


class ToolCallEnd(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The end of call `index`, which is complete. A call that was cut off has no such event."""

    index: int


class OutputWarning(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A defect of the answer, and how the parser handled it."""

    code: str
    message: str


class Finished(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The end of the answer, with its finish reason.

    `stop_reason` is the stop string that ended the answer. If a stop token ended it and the request
    named that token, it is the token's id.
    """

    reason: str
    stop_reason: str | int | None = None


class Failed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The end of an answer that the engine could not complete."""

    error: ErrorInfo


Event = (
    Content
    | Reasoning
    | ToolCall
    | ToolArguments
    | ToolText
    | ToolCallEnd
    | OutputWarning
    | Finished
    | Failed
)


class OutputDelta(msgspec.Struct, frozen=True):
    """New events of one choice, and the tokens from which they were made.

    A token whose text is held back is delivered with the delta that releases the text, so tokens
    and text stay in step. The last delta has all tokens that are left. If the client requested no
    text (`choice_parser.TokenPassthrough`), the only event is the end of the answer.
    """

    events: list[Event] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    #: Number of tokens that the engine sent after the end of the answer, in the message that ended
    #: it. They are not part of the answer, and not in `token_ids`.
    num_after_end: int = 0

    def __bool__(self) -> bool:
        return bool(self.events or self.token_ids)


def merged(events: Iterable[Event]) -> list[Event]:
    """Return the same answer in as few events as possible, with neighbouring texts joined."""
    whole: list[Event] = []
    runs: list[list[str]] = []
    for event in events:
        text = _text_of(event)
        if text is not None and whole and _continues(whole[-1], event):
            runs[-1].append(text)
        else:
            whole.append(event)
            runs.append([text] if text is not None else [])
    return [with_text(e, "".join(run)) if run else e for e, run in zip(whole, runs, strict=True)]


def _text_of(event: Event) -> str | None:
    if type(event) is Content or type(event) is Reasoning:
        return event.text
    return event.fragment if isinstance(event, ToolArguments | ToolText) else None


def _continues(before: Event, event: Event) -> bool:
    if type(before) is not type(event):
        return False
    if isinstance(before, ToolArguments | ToolText):
        assert isinstance(event, ToolArguments | ToolText)
        return before.index == event.index
    return True


def with_text(event: Event, text: str) -> Event:
    """Return a copy of `event` whose text is `text`."""
    if isinstance(event, ToolArguments | ToolText):
        return type(event)(event.index, text)
    assert isinstance(event, Content | Reasoning)  # other events have no text
    return type(event)(text)


def finish_reason(
    engine: FinishReason | None, *, stop_matched: bool = False, completed_calls: int = 0
) -> str:
    """Return the finish reason for the client. Raise ValueError if nothing has ended the answer.

    | engine reports | stop string | calls completed | reason       |
    |----------------|-------------|-----------------|--------------|
    | anything       | matched     | none            | `stop`       |
    | anything       | matched     | some            | `tool_calls` |
    | error          | no          | any             | `error`      |
    | length         | no          | any             | `length`     |
    | abort          | no          | any             | `abort`      |
    | stop           | no          | none            | `stop`       |
    | stop           | no          | some            | `tool_calls` |

    `stop_matched` is also true if the request allows only one call and that call is complete,
    because the call then ends the answer as a stop string does.

    The tokens of a stop string come before the engine ends the request. So the answer is complete,
    even if the engine then reports a limit or an abort. Without a stop string `length` always wins:
    completed calls do not hide that the rest was cut off.

    This function decides for every API, streamed or whole.
    """
    if not stop_matched:
        if engine is None:
            raise ValueError("an unfinished answer has no finish reason")
        if engine != "stop":
            return engine
    return "tool_calls" if completed_calls else "stop"
