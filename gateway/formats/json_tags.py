"""Calls as JSON objects, one or an array of them, behind a marker and mostly before another.

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>

    bound    behind an opening marker that needs another one behind it
    opened   an object or an array begins, or it is no call
    call     in a call's object
    array    in an array, between calls
    after    a call or an array is complete: the closing marker, or another opening one
    broken   what follows is no JSON; up to the next marker it is told as it stands

A call ends with its closing brace, not with the marker behind it. A call whose JSON breaks off is
told as far as it goes, if its name is known; otherwise the whole stretch is content. Behind a
marker that is ordinary text as well (`soft`) that is nothing to warn of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.formats.event_builder import BLANKS, PARSE_FAILED, EventBuilder
from gateway.formats.events import Event
from gateway.formats.json_scanner import SPACE, CallKeys, CallScan
from gateway.formats.parser import CallParser, Context, MachineState, SectionSyntax
from gateway.formats.patterns import past


class JsonTags(SectionSyntax, frozen=True, kw_only=True):
    """open       markers that begin a stretch; of two at one place the first wins. One that ends
               with `[` or `{` is the beginning of the JSON as well
    start      these begin a stretch only where nothing has been said
    close      markers that end it
    unclosed   openers whose stretch ends with its JSON; all of them, if there is no `close`
    bound      opener -> the marker that must stand behind it
    soft       openers that are ordinary text as well
    separator  stands between calls that are in no array; then several follow one marker
    keys       what the keys of a call's object are called

    A reader need not know, but a writer:

    paired     opener -> its closing marker, where that is not the first
    array      calls are written as an array
    before     what models write between the opening marker and the JSON
    behind     and between the JSON and the closing one
    lines      openers for which both are a line break instead
    number     the key of a call's number, which is written first
    """

    open: tuple[str, ...]
    start: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    unclosed: tuple[str, ...] = ()
    bound: tuple[tuple[str, str], ...] = ()
    soft: tuple[str, ...] = ()
    separator: str = ""
    keys: CallKeys = CallKeys()
    paired: tuple[tuple[str, str], ...] = ()
    array: bool = False
    before: str = ""
    behind: str = ""
    lines: tuple[str, ...] = ()
    number: str = ""

    def markers(self) -> tuple[str, ...]:
        return self.open + self.close + tuple(marker for _, marker in self.bound)

    def openers(self) -> tuple[str, ...]:
        return self.open

    def start_openers(self) -> tuple[str, ...]:
        return self.start

    def is_closed(self, opener: str) -> bool:
        return bool(self.close) and opener not in self.unclosed

    def closer(self, opener: str) -> str:
        """What models close a stretch with; "" for nothing."""
        if not self.is_closed(opener):
            return ""
        return dict(self.paired).get(opener, self.close[0])

    def section(
        self, context: Context, teller: EventBuilder, state: Mapping[str, Any] | None = None
    ) -> CallParser:
        return JsonTagsSection(self, context, teller, state)


class JsonTagsState(MachineState):
    """opener  what has begun this stretch
    call    the call at hand
    array   the stretch is an array
    raw     text that has not been told, and may have to be given back
    calls   how many calls of the stretch have been told
    """

    at: str = "opened"
    opener: str = ""
    call: CallScan = msgspec.field(default_factory=CallScan)
    array: bool = False
    raw: list[str] = []
    calls: int = 0


class JsonTagsSection(CallParser):
    syntax: JsonTags

    State = JsonTagsState
    BETWEEN = frozenset({"after"})
    UNSCANNED = frozenset({"call"})

    def table(self) -> Mapping[str, tuple[str, ...]]:
        markers = self.syntax.close + self.syntax.open
        states = ("opened", "call", "array", "after", "broken")
        bound = tuple(marker for _, marker in self.syntax.bound)
        return dict.fromkeys(states, markers) | {"bound": bound}

    def on_open(self, marker: str) -> None:
        s = self.s
        s.opener, s.raw, s.calls, s.array = marker, [marker], 0, False
        s.at = "bound" if any(marker == opener for opener, _ in self.syntax.bound) else "opened"
        if marker.endswith("["):
            s.at, s.array = "array", True
        elif marker.endswith("{"):
            s.raw.clear()
            s.at, s.call = "call", CallScan()
            self._in_call(marker)

    # ---- text

    def more(self, text: str) -> Event | None:
        s = self.s
        if s.at == "call" and s.call.passes(text):
            return self.teller.more(text)
        return None

    def on_text(self, text: str) -> str:
        match self.s.at:
            case "call":
                return self._in_call(text)
            case "broken":
                self._tell_broken(text)
                return ""
        start = past(SPACE, text)
        if self.s.raw:
            self.s.raw.append(text[:start])
        return self._next(text[start:]) if start < len(text) else ""

    def _next(self, text: str) -> str:
        """The first character that is no blank, between values."""
        s, char = self.s, text[0]
        expected = {"opened": "{[", "array": "{,]", "bound": ""}
        separator = self.syntax.separator
        if char not in expected.get(s.at, separator + "{" if separator else ""):
            return self._unexpected(text)
        if char == "{":
            s.at, s.call = "call", CallScan()
            return text
        if char == "]":
            return self._array_ended(text[1:])
        if char == "[":
            s.at, s.array = "array", True
        if s.raw:
            s.raw.append(char)
        return text[1:]

    def _in_call(self, text: str) -> str:
        s = self.s
        position, status = s.call.scan(text, self.syntax.keys, self.teller)
        if s.call.told:
            s.raw.clear()
        else:
            s.raw.append(text[:position])
        if status == "end" and s.call.told:
            s.calls += 1
            self._call_ended()
        elif status != "more":
            self._break()
        return text[position:]

    def _call_ended(self) -> None:
        s = self.s
        s.at = "array" if s.array else "after"
        if not s.array and not self.syntax.separator:
            s.done = not self.syntax.is_closed(s.opener)

    def _array_ended(self, rest: str) -> str:
        s = self.s
        if s.raw:  # an array of no calls
            s.raw.append("]")
            self._break()
            return rest
        s.at = "after"
        s.done = not self.syntax.is_closed(s.opener)
        return rest

    def _unexpected(self, text: str) -> str:
        """No call stands where one should."""
        s = self.s
        if not s.calls:
            self._give_back("the marker of a tool call, and no call behind it")
            s.done = True
        elif s.at == "after" and not self.syntax.is_closed(s.opener):
            s.done = True
        else:
            self.teller.warn(PARSE_FAILED, "text between tool calls")
            s.raw.clear()
            self._break()
        return text

    # ---- what is broken

    def _break(self) -> None:
        """It lasts up to a marker; where none will come, it ends here."""
        self.s.at = "broken"
        if not self.teller.is_open and not self.syntax.is_closed(self.s.opener):
            self._give_back("a tool call that cannot be read")
            self.s.done = True

    def _tell_broken(self, text: str) -> None:
        if self.teller.is_open:
            self.teller.fragment(text)
        elif self.s.raw:
            self.s.raw.append(text)
        else:
            self.teller.content(text)

    def _give_back(self, why: str) -> None:
        text = "".join(self.s.raw)
        self.s.raw.clear()
        if self.s.opener in self.syntax.soft:
            self.teller.content(text)
        else:
            self.teller.give_back(text, why)

    # ---- markers

    def on_marker(self, marker: str) -> None:
        s = self.s
        if s.at == "bound":
            s.raw.append(marker)
            s.at = "opened"
            return
        if s.at == "call" and s.call.quoted:
            self._in_call(marker)
            return
        if self.teller.is_open:
            self.teller.end()
        elif "".join(s.raw).strip(BLANKS + ","):
            s.raw.append(marker if marker in self.syntax.close else "")
            self._give_back("a tool call that cannot be read")
        if marker in self.syntax.close:
            s.done = True
        else:
            self.on_open(marker)

    def on_stray(self, marker: str) -> None:
        if self.s.at == "call" and self.s.call.quoted:
            self._in_call(marker)

    def on_end(self, complete: bool) -> None:
        if not complete:
            self.teller.drop()
        elif self.teller.is_open:
            self.teller.warn(PARSE_FAILED, "the last tool call is not finished")
            self.teller.drop()
        elif "".join(self.s.raw).strip(BLANKS + ","):
            self._give_back("a tool call that is not finished")


TOOL_CALL = JsonTags(open=("<tool_call>",), close=("</tool_call>",), before="\n", behind="\n")
TOOL_CALLS = JsonTags(open=("<tool_calls>",), close=("</tool_calls>",), array=True)
COMMAND = JsonTags(
    open=("<|START_ACTION|>",),
    close=("<|END_ACTION|>",),
    keys=CallKeys(name=("tool_name", "name"), arguments=("parameters", "arguments")),
    array=True,
    number="tool_call_id",
)
PARAMETERS = ("parameters", "arguments")
LLAMA = JsonTags(
    open=("<|python_tag|>",),
    start=("{",),
    soft=("{",),
    separator=";",
    keys=CallKeys(arguments=PARAMETERS, strict=True),
)

FORMATS = {
    "hermes": TOOL_CALL,
    "qwen3_json": TOOL_CALL,
    "granite4": TOOL_CALL,
    "ernie45": TOOL_CALL,
    "longcat": JsonTags(
        open=("<longcat_tool_call>",),
        close=("</longcat_tool_call>",),
        before="\n",
        behind="\n",
    ),
    "granite": JsonTags(
        open=("<|tool_call|>", "<tool_call>"),
        close=("</tool_call>",),
        unclosed=("<|tool_call|>", "<tool_call>"),
        array=True,
    ),
    "granite-20b-fc": JsonTags(open=("<function_call>",), before=" "),
    "internlm": JsonTags(
        open=("<|action_start|>",),
        close=("<|action_end|>",),
        bound=(("<|action_start|>", "<|plugin|>"),),
        keys=CallKeys(arguments=PARAMETERS),
        before="\n",
    ),
    "hunyuan_a13b": TOOL_CALLS,
    "jamba": TOOL_CALLS,
    "phi4_mini_json": JsonTags(open=("functools[",), soft=("functools[",), array=True),
    "xlam": JsonTags(
        open=("<tool_call>", "[TOOL_CALLS]"),
        start=("[", "```json"),
        close=("</tool_call>", "```"),
        unclosed=("[", "[TOOL_CALLS]"),
        soft=("```json", "["),
        keys=CallKeys(strict=True),
        paired=(("```json", "```"),),
        lines=("```json",),
        array=True,
    ),
    "llama3_json": LLAMA,
    "llama4_json": LLAMA,
    "gigachat3": JsonTags(
        open=("<|function_call|>", "function call"),
        bound=(("function call", "<|role_sep|>"),),
        soft=("function call",),
        lines=("function call",),
    ),
    "apertus": JsonTags(
        open=("<|tools_prefix|>",),
        close=("<|tools_suffix|>",),
        keys=CallKeys(name_is_key=True),
        array=True,
    ),
    "cohere_command3": COMMAND,
    "cohere_command4": COMMAND,
    "inkling": JsonTags(
        open=("<|content_invoke_tool_json|>",),
        close=("<|end_message|>",),
        keys=CallKeys(arguments=("args", "arguments")),
    ),
}
