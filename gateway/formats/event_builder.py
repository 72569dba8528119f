"""What machines tell, in order: content, reasoning, calls. Shared by every syntax.

Two laws live here, so that no syntax has to know them.

Blanks. Blanks around markup are no content: those before a call or a block of reasoning, between
calls, and after a call are dropped. So blanks at the end of content wait for what follows, and are
content only if more content does, or the end. Behind a block of reasoning or a marker around the
answer proper, and at both ends of the reasoning, newlines are dropped, as the templates do when
they render the answer again.

Calls. They are numbered from 0. Fragments of arguments go out as they come; joined they are the
JSON text. What can only be meant as JSON is mended (`json_object`). A call that ends is checked
once: no arguments are `{}`; what is no JSON object is told all the same, with a warning. Only `end`
makes a call complete: one that was cut off never ends.
"""

from __future__ import annotations

import json
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
)
from gateway.formats.json_object import BROKEN, PLAIN, STRING, ObjectScan

INVALID_ARGUMENTS = "invalid_tool_arguments"
UNKNOWN_TOOL = "unknown_tool"
PARSE_FAILED = "tool_parse_failed"

BLANKS = " \t\r\n"
NEWLINES = "\r\n"


class DeclaredTool(msgspec.Struct, frozen=True):
    """A tool of the request. `parameters` is the JSON schema of its arguments, if it has one."""

    name: str
    parameters: Mapping[str, Any] | None = None


class EventBuilderState(msgspec.Struct):
    """blanks      wait to be content; joined, and not told yet
    dropping    characters that are dropped until there is another one
    said        content or a call has been told
    num_calls   how many calls have begun
    open        the last of them has not ended
    arguments   whether the open call's arguments so far are the beginning of a JSON object
    """

    blanks: list[str] = []
    dropping: str = ""
    said: bool = False
    num_calls: int = 0
    open: bool = False
    arguments: ObjectScan = msgspec.field(default_factory=ObjectScan)


class BuilderCheckpoint(msgspec.Struct, frozen=True):
    """What `EventBuilder.roll_back` goes back to."""

    num_events: int
    state: EventBuilderState


class EventBuilder:
    """One choice's. Events gather in `out` until they are taken. Calls get their ids then, so none
    is drawn for a call that is rolled back."""

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
        """Plain data. Events that have not been taken are no part of it."""
        data: dict[str, Any] = msgspec.to_builtins(self.s)
        return data

    def drain(self) -> list[Event]:
        events, self.out = self.out, []
        if not self._lacks_ids:
            return events
        self._lacks_ids = False
        return [self._with_id(event) if type(event) is ToolCall else event for event in events]

    def _with_id(self, call: ToolCall) -> ToolCall:
        return call if call.id else ToolCall(call.index, self._new_id(), call.name)

    def checkpoint(self) -> BuilderCheckpoint:
        """No call is open."""
        state = msgspec.structs.replace(self.s, blanks=[*self.s.blanks], arguments=ObjectScan())
        return BuilderCheckpoint(len(self.out), state)

    def roll_back(self, checkpoint: BuilderCheckpoint) -> None:
        """Untell all events since then. None of them may have been taken."""
        del self.out[checkpoint.num_events :]
        self.s = checkpoint.state

    # ---- text

    def content(self, text: str) -> None:
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
        """`text`, which is not empty, would be told as it stands, and alone."""
        s = self.s
        return not s.blanks and not s.dropping and s.said and text[-1] not in BLANKS

    def passes_reasoning(self, text: str) -> bool:
        """The same of reasoning."""
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
        self.s.blanks, self.s.dropping = [], NEWLINES

    def reasoning(self, text: str) -> None:
        """Between `begin_reasoning` and `end_reasoning`."""
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
        self.s.blanks, self.s.dropping = [], NEWLINES

    def markup(self) -> None:
        """Markup that is neither: blanks before it and newlines behind it are no content."""
        self.s.blanks, self.s.dropping = [], NEWLINES

    def finish(self) -> None:
        """Blanks at the very end of content are content."""
        if self.s.blanks:
            self.out.append(Content("".join(self.s.blanks)))
            self.s.blanks = []

    def warn(self, code: str, message: str) -> None:
        self.out.append(OutputWarning(code, message))

    def reject_call(self, text: str, why: str) -> None:
        """Text that looked like a call and is none: content, with a warning."""
        self.content(text)
        self.warn(PARSE_FAILED, why)

    # ---- calls

    @property
    def is_open(self) -> bool:
        """A call has begun and not ended."""
        return self.s.open

    @property
    def has_arguments(self) -> bool:
        """Of the open call, something has been told."""
        return not self.s.arguments.is_blank

    @property
    def num_calls(self) -> int:
        return self.s.num_calls

    def declares(self, name: str, *, surely: bool = False) -> bool:
        """Whether the request has such a tool; where nothing is known, anything but `surely`."""
        return not surely if self._tools is None else name in self._tools

    def parameters(self, name: str) -> Mapping[str, Any] | None:
        """The JSON schema of a tool's arguments, where it is known."""
        tool = self._tools.get(name) if self._tools else None
        return tool.parameters if tool else None

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """A call begins. `call_id` is the model's own; without one it gets ours."""
        assert not self.s.open, "calls do not nest"
        s = self.s
        s.blanks, s.dropping, s.said, s.open = [], BLANKS, True, True
        self._lacks_ids |= not call_id
        self.out.append(ToolCall(s.num_calls, call_id or "", name))
        s.num_calls += 1
        if not self.declares(name):
            self.warn(UNKNOWN_TOOL, f"{name!r} is no tool of this request")

    def arguments_delta(self, text: str) -> None:
        """More of the open call's arguments."""
        if mended := self.s.arguments.push(text):
            self.out.append(ToolArguments(self.s.num_calls - 1, mended))

    def fast_arguments(self, text: str) -> ToolArguments | None:
        """What `fragment` would tell of text that only goes on with a JSON string, or with what is
        no JSON anyway; None where it has to be read."""
        at = self.s.arguments.at
        if at == BROKEN or (at == STRING and PLAIN.fullmatch(text)):
            return ToolArguments(self.s.num_calls - 1, text)
        return None

    def end_call(self) -> None:
        """The open call is complete."""
        index, arguments = self.s.num_calls - 1, self.s.arguments
        if rest := arguments.finish():
            self.out.append(ToolArguments(index, rest))
        if arguments.is_blank:
            self.out.append(ToolArguments(index, "{}"))
        elif not arguments.is_object:
            self.warn(INVALID_ARGUMENTS, f"the arguments of call {index} are no JSON object")
        self.out.append(ToolCallEnd(index))
        self.abandon_call()

    def abandon_call(self) -> None:
        """The open call, if there is one, was cut off: it never ends."""
        self.s.open, self.s.arguments = False, ObjectScan()


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


def is_json_object(text: str) -> bool:
    """In linear time, for any text: numbers are not computed."""
    try:
        value = json.loads(text, parse_int=len, parse_float=len, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
