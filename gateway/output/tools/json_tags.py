"""Calls as JSON objects, one or an array of them, behind a marker and mostly before another.

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>

    opened   behind the opening marker: an object or an array begins, or it is no call
    call     in a call's object
    array    in an array, between calls
    after    a call or an array is complete: the closing marker, or another opening one
    broken   what follows is no JSON; up to the closing marker it is told as it stands

A call ends with its closing brace, not with the marker behind it. A call whose JSON breaks off is
told as far as it goes, if its name is known; otherwise the whole stretch is content.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.output.machine import Context, MachineState, Section, SectionSyntax
from gateway.output.teller import PARSE_FAILED, Teller
from gateway.output.tools.json_value import SPACE, CallKeys, CallScan


class JsonTags(SectionSyntax, frozen=True, kw_only=True):
    """open    markers that begin a stretch; of two at one place the first wins
    close   markers that end it; none: it ends with its JSON
    keys    what the keys of a call's object are called
    """

    open: tuple[str, ...]
    close: tuple[str, ...] = ()
    keys: CallKeys = CallKeys()

    def markers(self) -> tuple[str, ...]:
        return self.open + self.close

    def openers(self) -> tuple[str, ...]:
        return self.open

    def section(
        self, context: Context, teller: Teller, state: Mapping[str, Any] | None = None
    ) -> Section:
        return JsonTagsSection(self, context, teller, state)


class JsonTagsState(MachineState):
    """call   the call at hand
    first  how many calls had been told before this stretch
    array  the stretch is an array
    raw    its text, until a call is told: it may have to be given back
    """

    at: str = "opened"
    call: CallScan = msgspec.field(default_factory=CallScan)
    array: bool = False
    raw: list[str] = []


class JsonTagsSection(Section):
    State = JsonTagsState
    UNSCANNED = frozenset({"call"})

    def __init__(
        self,
        syntax: JsonTags,
        context: Context,
        teller: Teller,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.syntax = syntax
        super().__init__(context, teller, state)

    def table(self) -> Mapping[str, tuple[str, ...]]:
        markers = self.syntax.close + self.syntax.open
        return dict.fromkeys(("opened", "call", "array", "after", "broken"), markers)

    def on_open(self, marker: str) -> None:
        self.s.raw = [marker]

    def on_text(self, text: str) -> str:
        match self.s.at:
            case "call":
                return self._in_call(text)
            case "broken":
                self._tell_broken(text)
                return ""
        start = SPACE.match(text).end()  # type: ignore[union-attr]
        self.s.raw.append(text[:start])
        return self._next(text[start:]) if start < len(text) else ""

    def _next(self, text: str) -> str:
        """The first character that is no blank, between values."""
        char, s = text[0], self.s
        if char == "{" and (s.at == "opened" or s.at == "array"):
            s.at, s.call = "call", CallScan()
            return text
        if s.at == "opened" and char == "[":
            s.at, s.array = "array", True
            return self._skip(text)
        if s.at == "array" and char == ",":
            return self._skip(text)
        if s.at == "array" and char == "]":
            return self._ended(self._skip(text))
        return self._unexpected(text)

    def _skip(self, text: str) -> str:
        self.s.raw.append(text[0])
        return text[1:]

    def _in_call(self, text: str) -> str:
        s = self.s
        position, status = s.call.scan(text, self.syntax.keys, self.teller)
        if s.call.name is None:
            s.raw.append(text[:position])
        rest = text[position:]
        if status == "broken":
            s.at = "broken"
            self._give_up_without_markers()
        elif status == "end":
            self._call_ended()
        return rest

    def _call_ended(self) -> None:
        """Behind the call's closing brace."""
        s = self.s
        if s.call.name is None:
            s.at = "broken"
            self._give_up_without_markers()
        elif s.array:
            s.at, s.raw = "array", []
        else:
            s.raw = []
            self._ended("")

    def _ended(self, rest: str) -> str:
        """Behind the stretch's JSON."""
        s = self.s
        if s.raw and s.raw[0] in self.syntax.open:  # an array of nothing
            self._give_back("an array of no calls")
        s.at, s.raw = "after", []
        s.done = s.done or not self.syntax.close
        return rest

    def _unexpected(self, text: str) -> str:
        s = self.s
        if s.raw and s.raw[0] in self.syntax.open:
            self._give_back("a marker of tool calls with no call behind it")
            s.done = True
            return text
        self.teller.warn(PARSE_FAILED, "text between tool calls")
        s.at, s.raw = "broken", []
        self._give_up_without_markers()
        return text

    def _give_up_without_markers(self) -> None:
        """What is broken lasts up to a marker; where there is none, it ends here."""
        if self.syntax.close or self.teller.is_open:
            return
        self._give_back("a tool call that is no JSON")
        self.s.done = True

    def _tell_broken(self, text: str) -> None:
        if self.teller.is_open:
            self.teller.fragment(text)
        elif self.s.raw:
            self.s.raw.append(text)
        else:
            self.teller.content(text)

    def _give_back(self, why: str) -> None:
        if self.s.raw:
            self.teller.give_back("".join(self.s.raw), why)
            self.s.raw = []

    def on_marker(self, marker: str) -> None:
        s = self.s
        if s.at == "call" and s.call.quoted:
            self._in_call(marker)
            return
        if self.teller.is_open:
            self.teller.end()
        elif s.at in ("opened", "call", "broken") and s.raw:
            s.raw.append(marker)
            self._give_back("a tool call that is no JSON")
        if marker in self.syntax.close:
            s.done = True
        else:
            s.at, s.array, s.raw = "opened", False, [marker]

    def on_stray(self, marker: str) -> None:
        if self.s.at == "call" and self.s.call.quoted:
            self._in_call(marker)

    def on_end(self, complete: bool) -> None:
        if not complete:
            self.teller.drop()
        elif self.teller.is_open:
            self.teller.warn(PARSE_FAILED, "the last tool call is not finished")
            self.teller.drop()
        elif "".join(self.s.raw).strip(" \t\r\n,"):
            self._give_back("a tool call that is not finished")


FORMATS = {
    "hermes": JsonTags(open=("<tool_call>",), close=("</tool_call>",)),
    "qwen3_json": JsonTags(open=("<tool_call>",), close=("</tool_call>",)),
}
