"""Reads the text of a call whose tool takes one text instead of named arguments.

The model writes such a call like any other, with the text as the only argument. `TextArgument`
takes the JSON of the arguments in pieces and returns the text in pieces. Arguments after the text
are dropped. If a model writes others instead, the text is the only argument, if that is a string,
or else their JSON.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

ARGUMENT = "input"
"""Name of the argument."""
_START = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_START_WITHOUT_BLANKS = '{"input":"'
_BLANKS = re.compile(r"\s+")
_PLAIN = re.compile(r'[^"\\]+')
_UNIT = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[^u])", re.DOTALL)
_HIGH = re.compile(r"\\u[dD][89abAB]")
_LOW = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_LONGEST_UNIT = 6
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Place = Literal["before", "inside", "after", "other"]


class TextArgument(msgspec.Struct):
    """A scan of a call's arguments, as plain data.

    at    "before" the text, "inside" it, "after" it, or in "other" arguments than expected
    held  JSON that has been read, but whose text has not been returned: "inside", the start of an
          escape; "before", all of it
    rest  the same in "other" arguments, in pieces
    """

    at: Place = "before"
    held: str = ""
    rest: list[str] = []

    def push(self, fragment: str) -> str:
        """Return the text that a piece of the JSON adds."""
        if self.at == "after":
            return ""
        if self.at == "other":
            self.rest.append(fragment)
            return ""
        self.held += fragment
        if self.at == "before" and not fragment.isspace():  # there may be any number of blanks
            self._start()
        return self._inside() if self.at == "inside" else ""

    def finish(self) -> str:
        """Return the rest of the text at the end of a complete call."""
        if self.at in ("inside", "after"):
            return ""
        whole = self.held + "".join(self.rest)
        self.held, self.rest, self.at = "", [], "after"
        return _text_of(whole)

    def _start(self) -> None:
        if found := _START.match(self.held):
            self.held, self.at = self.held[found.end() :], "inside"
        elif not _START_WITHOUT_BLANKS.startswith(_BLANKS.sub("", self.held)):
            self.at = "other"

    def _inside(self) -> str:
        """Return the text of `held`, without an escape at its end that may continue."""
        source, at = self.held, 0
        text: list[str] = []
        while at < len(source):
            if source[at] == '"':
                self.at, at = "after", len(source)
                break
            if found := _PLAIN.match(source, at):
                text.append(found[0])
                at = found.end()
                continue
            unit = _UNIT.match(source, at)
            if unit is None:
                if len(source) - at < _LONGEST_UNIT:
                    break
                text.append(source[at])  # not an escape, so the backslash stands for itself
                at += 1
                continue
            end = unit.end()
            if _HIGH.match(source, at):
                if len(source) - end < _LONGEST_UNIT and _may_continue_pair(source[end:]):
                    break
                if low := _LOW.match(source, end):
                    end = low.end()
            text.append(_unescaped(source[at:end]))
            at = end
        self.held = source[at:]
        return "".join(text)


def _may_continue_pair(rest: str) -> bool:
    return "\\u"[: len(rest)] == rest[:2]


def _unescaped(escape: str) -> str:
    try:
        value: str = msgspec.json.decode(f'"{escape}"', type=str)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return _REPLACEMENT if escape.startswith("\\u") else escape
    return value


def _text_of(arguments: str) -> str:
    try:
        value: Any = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return arguments
    if isinstance(value, str):
        return value
    texts = [text for text in value.values() if isinstance(text, str)] if _is_object(value) else []
    return texts[0] if len(texts) == 1 == len(value) else "" if value == {} else arguments


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)
