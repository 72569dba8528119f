"""Answers of elements whose tags are made of tokens: Kimi K3's XTML.

    <|open|>think<|sep|>Hm.<|close|>think<|sep|>
    <|open|>response<|sep|>I will look.<|close|>response<|sep|>
    <|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>
    <|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|>

(Without the line breaks.)

    text  in an element, or between elements
    tag   behind `<|open|>` or `<|close|>`, up to `<|sep|>`

`INSIDE` says which element may stand in which; any other tag is text of the element it stands in.
So a string may hold every tag but its own closing one. An answer begins inside a response, if the
prompt has not opened the thinking: its own opening tag may be missing. In attributes `&quot;` and
`&amp;` are escaped; values are not. An argument whose type is string is told as it comes, verbatim;
any other is JSON, or a string if it is none.

Source: the published parser's description of the protocol.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.formats.argument_types import ArgumentsWriter
from gateway.formats.event_builder import BLANKS, PARSE_FAILED, EventBuilder
from gateway.formats.parser import AnswerSyntax, Context, FormatParser, MachineState

MAX_TAG_CHARS = 512
ATTRIBUTE = re.compile(r'\s+(\w+)="([^"]*)"')
NAME = re.compile(r"\w+")

CHANNELS = ("think", "response", "tools")
INSIDE = {"": CHANNELS, "think": CHANNELS, "response": CHANNELS, "tools": ("call",),
          "call": ("argument",), "argument": ()}  # fmt: skip
"""Element -> elements that may open in it. A channel that opens in another one ends it."""


class Xtml(AnswerSyntax, frozen=True, kw_only=True):
    """open, close  begin a tag
    separator    ends it
    """

    open: str = "<|open|>"
    close: str = "<|close|>"
    separator: str = "<|sep|>"

    def markers(self) -> tuple[str, ...]:
        return (self.open, self.close, self.separator)

    def machine(
        self,
        context: Context,
        teller: EventBuilder,
        state: Mapping[str, Any] | None = None,
        *,
        starts_inside: bool = False,
    ) -> FormatParser:
        return XtmlMachine(self, context, teller, state, starts_inside=starts_inside)


class XtmlState(MachineState):
    """stack      names of the open elements
    tag        the tag at hand, its marker included
    arguments  of the open call
    spilt      among the calls, there was text
    """

    at: str = "text"
    stack: list[str] = []
    tag: str = ""
    arguments: ArgumentsWriter = msgspec.field(default_factory=ArgumentsWriter)
    spilt: bool = False


class XtmlMachine(FormatParser):
    State = XtmlState

    def __init__(
        self,
        syntax: Xtml,
        context: Context,
        teller: EventBuilder,
        state: Mapping[str, Any] | None = None,
        *,
        starts_inside: bool = False,
    ) -> None:
        self.syntax = syntax
        super().__init__(context, teller, state)
        if state is None:
            self._begin("think" if starts_inside else "response")

    def table(self) -> Mapping[str, tuple[str, ...]]:
        x = self.syntax
        return {"text": (x.open, x.close), "tag": (x.separator, x.open, x.close)}

    @property
    def _in(self) -> str:
        """The innermost open element; "" between channels."""
        return self.s.stack[-1] if self.s.stack else ""

    # ---- text

    def on_text(self, text: str) -> str:
        if self.s.at == "tag":
            return self._in_tag(text)
        match self._in:
            case "think":
                self.teller.reasoning(text)
            case "argument":
                self.s.arguments.text(text, self.teller)
            case "tools" | "call":
                self._spill(text)
            case "":
                if text.strip(BLANKS):
                    self._begin("response")
                    self.teller.content(text)
            case _:
                self.teller.content(text)
        return ""

    def _spill(self, text: str) -> None:
        """Among the calls, outside their arguments: not ours to tell, unless it says something."""
        s = self.s
        if self._in == "call" or not (s.spilt or text.strip(BLANKS)):
            return
        if not s.spilt:
            s.spilt = True
            self.teller.warn(PARSE_FAILED, "text between tool calls")
        self.teller.content(text)

    def _in_tag(self, text: str) -> str:
        s = self.s
        s.tag += text
        if "\n" in text or len(s.tag) > MAX_TAG_CHARS:
            self._was_text()
        return ""

    def _was_text(self) -> None:
        """What looked like a tag belongs to the element it stands in."""
        tag, self.s.tag, self.s.at = self.s.tag, "", "text"
        self.on_text(tag)

    # ---- tags

    def on_marker(self, marker: str) -> None:
        s, x = self.s, self.syntax
        if marker == x.separator:
            s.at = "text"
            if not self._tag():
                s.tag += marker
                self._was_text()
            s.tag = ""
            return
        if s.at == "tag":
            self._was_text()
        s.at, s.tag = "tag", marker

    def on_stray(self, marker: str) -> None:
        if self._in in ("think", "argument"):
            self.on_text(marker)

    def _tag(self) -> bool:
        """A tag is complete; whether it means anything here."""
        tag, x = self.s.tag, self.syntax
        opens = tag.startswith(x.open)
        body = tag.removeprefix(x.open if opens else x.close).strip(BLANKS)
        found = NAME.match(body)
        if found is None:
            return False
        if opens:
            return self._open(found[0], attributes(body[found.end() :]))
        return self._close(found[0]) if found[0] == body else False

    def _open(self, name: str, given: Mapping[str, str]) -> bool:
        if name not in INSIDE[self._in] or (name == "call" and not given.get("tool")):
            return False
        if name in CHANNELS and self.s.stack:
            self._end(self._in)
        self._begin(name, given)
        return True

    def _begin(self, name: str, given: Mapping[str, str] | None = None) -> None:
        s, given = self.s, given or {}
        s.stack.append(name)
        match name:
            case "think":
                self.teller.begin_reasoning()
            case "call":
                s.arguments = ArgumentsWriter()
                self.teller.begin(given["tool"])
            case "argument":
                kinds = ("string",) if given.get("type", "string") == "string" else ()
                s.arguments.begin(given.get("key", ""), kinds, self.teller, bare_json=not kinds)

    def _close(self, name: str) -> bool:
        if name == "message" and self._in != "argument":
            return True
        if name == "tools" and self._in == "call":
            self._end("call")
        if name != self._in:
            return False
        self._end(name)
        return True

    def _end(self, name: str) -> None:
        s = self.s
        s.stack.pop()
        match name:
            case "think":
                self.teller.end_reasoning()
            case "argument":
                s.arguments.end(self.teller, bare_json=True)
            case "call":
                s.arguments.close(self.teller)
                self.teller.end()

    # ---- the end

    def on_end(self, complete: bool) -> None:
        if complete and self.s.at == "tag":
            self._was_text()
        if complete and self.teller.is_open:
            self.teller.warn(PARSE_FAILED, "the last tool call is not finished")
        self.teller.drop()
        if self._in == "think":
            self.teller.end_reasoning()
        self.teller.finish()


def attributes(text: str) -> dict[str, str]:
    return {
        found[1]: found[2].replace("&quot;", '"').replace("&amp;", "&")
        for found in ATTRIBUTE.finditer(text)
    }


FORMATS = {"kimi_k3": Xtml()}
