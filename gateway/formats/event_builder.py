"""Builds the events of one answer: content, reasoning and calls. Every format uses it.

The builder applies two sets of rules, so that parsers do not have to.

Blanks: blanks around markup are not content. Blanks before a call, before a block of reasoning,
between calls and after a call are dropped. Therefore blanks at the end of content are held back.
They become content only if more content or the end of the answer follows. Newlines are dropped
after a block of reasoning, after a marker around the answer proper, and at both ends of reasoning,
because templates drop them when they render the answer again.

Calls: calls are numbered from 0. Fragments of arguments are emitted as they arrive; joined, they
are the JSON text. Text that can only be meant as JSON is repaired (`json_scanner`). A call is
checked once, when it ends: empty arguments become `{}`. Arguments that are not a JSON object, or
that JSON readers cannot hold (`readable_json`), are emitted with a warning. Only `end_call`
completes a call. A call that was cut off has no end event.

Markup: a parser reports markup of calls that it finds in content. If the answer has neither a call
nor another warning about one, it ends with a warning.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

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
from gateway.formats.json_scanner import BROKEN, STRING, LiteralScan, object_scan
from gateway.formats.json_spelling import PLAIN
from gateway.formats.text_argument import TextArgument

INVALID_ARGUMENTS = "invalid_tool_arguments"
UNKNOWN_TOOL = "unknown_tool"
PARSE_FAILED = "tool_parse_failed"

BLANKS = " \t\r\n"
NEWLINES = "\r\n"


class DeclaredTool(msgspec.Struct, frozen=True):
    """A tool of the request. `parameters` is the JSON schema of its arguments, if it has one. If
    `takes_text`, its calls have one text, which the model writes as the argument `input`."""

    name: str
    parameters: Mapping[str, Any] | None = None
    takes_text: bool = False


class EventBuilderState(msgspec.Struct):
    """State of an `EventBuilder`, as plain data.

    blanks      held-back blanks, which become content if more content follows
    dropping    characters to drop until any other character arrives
    said        whether content or a call has been emitted
    num_calls   number of calls that have started
    open        whether the last of these calls has not ended
    markup      the first markup of calls that was found in content
    failed      whether there has been a warning about text that looked like a call
    arguments   scan of the open call's arguments so far
    text        scan of the open call's text; None: its tool takes arguments
    """

    blanks: list[str] = []
    dropping: str = ""
    said: bool = False
    num_calls: int = 0
    open: bool = False
    markup: str = ""
    failed: bool = False
    arguments: LiteralScan = msgspec.field(default_factory=object_scan)
    text: TextArgument | None = None


class BuilderCheckpoint(msgspec.Struct, frozen=True):
    """A position in the events of an EventBuilder. `checkpoint` makes it, and `roll_back` removes
    all later events."""

    num_events: int
    state: EventBuilderState


class EventBuilder:
    """Builds the events of one choice, and collects them in `out` until `drain` returns them. Calls
    get their ids in `drain`, so no id is spent on a call that is rolled back."""

    __slots__ = ("_lacks_ids", "_new_id", "_tools", "out", "s")

    def __init__(
        self,
        tools: Sequence[DeclaredTool] | None,
        new_id: Callable[[], str],
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._tools = None if tools is None else {tool.name: tool for tool in tools}
        self._new_id = new_id
        self._lacks_ids = False
        self.out: list[Event] = []
        self.s = EventBuilderState() if state is None else msgspec.convert(state, EventBuilderState)

    def state(self) -> dict[str, Any]:
        """Return the state as plain data, without the events that have not been drained."""
        data: dict[str, Any] = msgspec.to_builtins(self.s)
        return data

    def drain(self) -> list[Event]:
        """Return the events built since the last call."""
        events, self.out = self.out, []
        if not self._lacks_ids:
            return events
        self._lacks_ids = False
        return [self._with_id(event) if type(event) is ToolCall else event for event in events]

    def _with_id(self, call: ToolCall) -> ToolCall:
        return call if call.id else msgspec.structs.replace(call, id=self._new_id())

    def checkpoint(self) -> BuilderCheckpoint:
        """Return the current position, for `roll_back`. No call may be open."""
        state = msgspec.structs.replace(self.s, blanks=[*self.s.blanks], arguments=object_scan())
        return BuilderCheckpoint(len(self.out), state)

    def roll_back(self, checkpoint: BuilderCheckpoint) -> None:
        """Remove all events since the checkpoint. None of them may have been drained."""
        del self.out[checkpoint.num_events :]
        self.s = checkpoint.state

    # ---- text

    def content(self, text: str) -> None:
        """Add content. Blanks at its end are held back."""
        s = self.s
        if s.dropping:
            text = text.lstrip(s.dropping)
        if not text:
            return
        s.dropping = ""
        if not s.blanks and text[-1] not in BLANKS:
            s.said = True
            self.out.append(Content(text))
        else:
            self._content_with_blanks(text)

    def passes_content(self, text: str) -> bool:
        """Return whether `content` would emit the non-empty `text` unchanged, as one event."""
        s = self.s
        return not s.blanks and not s.dropping and s.said and text[-1] not in BLANKS

    def passes_reasoning(self, text: str) -> bool:
        """Return whether `reasoning` would emit the non-empty `text` unchanged, as one event."""
        s = self.s
        return not s.blanks and not s.dropping and text[-1] not in NEWLINES

    def _content_with_blanks(self, text: str) -> None:
        s = self.s
        solid = text.rstrip(BLANKS)
        if solid:
            s.said = True
            self.out.append(Content("".join([*s.blanks, solid])))
            s.blanks = []
        if len(solid) < len(text):
            s.blanks.append(text[len(solid) :])

    def start_reasoning(self) -> None:
        """Start a block of reasoning: drop the blanks before it, and the newlines at its start."""
        self.s.blanks, self.s.dropping = [], NEWLINES

    def continue_reasoning(self) -> None:
        """Continue a block of reasoning whose text the prompt has begun: keep the newlines that
        come next, as they separate its paragraphs."""
        self.s.dropping = ""

    def reasoning(self, text: str) -> None:
        """Add reasoning, between `start_reasoning` and `end_reasoning`."""
        s = self.s
        if s.dropping:
            text = text.lstrip(s.dropping)
        if not text:
            return
        s.dropping = ""
        solid = text.rstrip(NEWLINES)
        if solid:
            self.out.append(Reasoning("".join([*s.blanks, solid])))
            s.blanks = []
        if len(solid) < len(text):
            s.blanks.append(text[len(solid) :])

    def end_reasoning(self) -> None:
        """End a block of reasoning: drop the newlines at its end, and those after it."""
        self.s.blanks, self.s.dropping = [], NEWLINES

    def markup(self) -> None:
        """Handle a marker before or after the answer proper (the text for the user): drop the
        blanks before the marker, and the newlines after it."""
        self.s.blanks, self.s.dropping = [], NEWLINES

    def finish(self) -> None:
        """End the answer: emit the held-back blanks at the very end of its content, and the warning
        about markup of calls if there was no call."""
        s = self.s
        if s.blanks:
            self.out.append(Content("".join(s.blanks)))
            s.blanks = []
        if s.markup and not (s.num_calls or s.failed):
            self.parse_failed(markup_without_call(s.markup))

    def warn(self, code: str, message: str) -> None:
        self.out.append(OutputWarning(code, message))

    def found_markup(self, marker: str) -> None:
        """Record that content has `marker`, which has a meaning in calls only."""
        self.s.markup = self.s.markup or marker

    def parse_failed(self, why: str) -> None:
        self.s.failed = True
        self.warn(PARSE_FAILED, why)

    def reject_call(self, text: str, why: str) -> None:
        """Emit `text`, which looked like a call but is not one, as content, with a warning."""
        self.content(text)
        self.parse_failed(why)

    # ---- calls

    @property
    def is_open(self) -> bool:
        """Whether a call has started and not ended."""
        return self.s.open

    @property
    def has_arguments(self) -> bool:
        """Whether any arguments of the open call have been emitted."""
        return not self.s.arguments.is_blank

    @property
    def num_calls(self) -> int:
        return self.s.num_calls

    def declares(self, name: str, *, surely: bool = False) -> bool:
        """Return whether the request has a tool `name`. If the request's tools are unknown, return
        `not surely`."""
        return not surely if self._tools is None else name in self._tools

    def parameters(self, name: str) -> Mapping[str, Any] | None:
        """Return the JSON schema of the arguments of tool `name`. Return None if the request has no
        tool of that name, or if that tool has no schema."""
        tool = self._tools.get(name) if self._tools else None
        return tool.parameters if tool else None

    def _takes_text(self, name: str) -> bool:
        tool = self._tools.get(name) if self._tools else None
        return tool is not None and tool.takes_text

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Start a call. If the model wrote no `call_id`, `drain` makes an id."""
        assert not self.s.open, "calls do not nest"
        s = self.s
        s.blanks, s.dropping, s.said, s.open = [], BLANKS, True, True
        self._lacks_ids |= not call_id
        takes_text = self._takes_text(name)
        s.text = TextArgument() if takes_text else None
        self.out.append(ToolCall(s.num_calls, call_id or "", name, takes_text))
        s.num_calls += 1
        if not self.declares(name):
            self.warn(UNKNOWN_TOOL, f"{name!r} is not a tool of this request")

    def arguments_delta(self, text: str) -> None:
        """Add a piece of the open call's arguments."""
        if repaired := self.s.arguments.push(text):
            self._emit_arguments(repaired)

    def _emit_arguments(self, text: str) -> None:
        """Emit a piece of the arguments' JSON, or the text that it adds to a call of one text."""
        index = self.s.num_calls - 1
        if self.s.text is None:
            self.out.append(ToolArguments(index, text))
        elif piece := self.s.text.push(text):
            self.out.append(ToolText(index, piece))

    def fast_arguments(self, text: str) -> ToolArguments | None:
        """Return the event for a piece of arguments that needs no scan: it only continues a JSON
        string, or broken JSON. Return None for any other text, which the caller must pass to
        `arguments_delta`, and in a call of one text."""
        if self.s.text is not None:
            return None
        at, is_half = self.s.arguments.at, self.s.arguments.readable.is_half
        if at == BROKEN or (at == STRING and not is_half and PLAIN.fullmatch(text)):
            return ToolArguments(self.s.num_calls - 1, text)
        return None

    def end_call(self) -> None:
        """Complete the open call: check its arguments and emit its end."""
        index, arguments = self.s.num_calls - 1, self.s.arguments
        if rest := arguments.finish():
            self._emit_arguments(rest)
        if arguments.is_blank:
            self._emit_arguments("{}")
        elif self.s.text is None:
            self._check_arguments(index)
        if self.s.text is not None and (piece := self.s.text.finish()):
            self.out.append(ToolText(index, piece))
        self.out.append(ToolCallEnd(index))
        self.abandon_call()

    def _check_arguments(self, index: int) -> None:
        arguments = self.s.arguments
        if not arguments.is_object:
            self.warn(INVALID_ARGUMENTS, f"the arguments of call {index} are not a JSON object")
        elif problem := arguments.readable.problem:
            self.warn(INVALID_ARGUMENTS, f"the arguments of call {index} have {problem}")

    def abandon_call(self) -> None:
        """Close the open call, if there is one. `end_call` emits `ToolCallEnd` and then calls this.
        A call that is closed without `end_call` counts as cut off: no event says that it has ended.
        If it takes one text and had other arguments, they are emitted as they are."""
        text = self.s.text
        if text is not None and text.at == "other":
            self.out.append(ToolText(self.s.num_calls - 1, text.finish()))
        self.s.open, self.s.arguments, self.s.text = False, object_scan(), None


def markup_without_call(marker: str) -> str:
    """Return the warning about an answer whose content has a marker of calls, but that has no
    call."""
    return f"the answer has {marker}, which is markup of calls, but no call"


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)
