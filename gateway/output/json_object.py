"""Whether a text that comes bit by bit is one JSON object, remembering no more than its open
brackets.

The same verdict as `json.loads`, for any cut, in linear time; but an object nested deeper than
MAX_DEPTH is none. (`json.loads` takes it, or fails, as the stack allows.) The memory is plain data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from gateway.output.patterns import past

MAX_DEPTH = 500

OPEN, BROKEN, END = "open", "broken", "end"
VALUE, FIRST, KEY, NEXT_KEY, COLON, COMMA = "value", "first", "key", "next key", "colon", "comma"
STRING, ESCAPE, HEX, WORD = "string", "escape", "hex", "word"

PLAIN = re.compile(r'[^"\\\x00-\x1f]*+')
BLANKS = re.compile(r"[ \t\r\n]*+")
WORDS = {"t": "rue", "f": "alse", "n": "ull"}
HEX_DIGITS = frozenset("0123456789abcdefABCDEF")

_DIGITS = dict.fromkeys("0123456789")
_DOT, _E = {".": "dot"}, {"e": "e", "E": "e"}
NUMBER: Mapping[str, Mapping[str, str]] = {
    "minus": {"0": "zero"} | dict.fromkeys("123456789", "whole"),
    "zero": _DOT | _E,
    "whole": dict.fromkeys(_DIGITS, "whole") | _DOT | _E,
    "dot": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": dict.fromkeys(_DIGITS, "fraction") | _E,
    "e": dict.fromkeys(_DIGITS, "exponent") | {"+": "sign", "-": "sign"},
    "sign": dict.fromkeys(_DIGITS, "exponent"),
    "exponent": dict.fromkeys(_DIGITS, "exponent"),
}
"""State of a number -> the next character -> the next state."""
WHOLE_NUMBERS = frozenset({"zero", "whole", "fraction", "exponent"})
BEGINS_NUMBER = {"-": "minus"} | dict(NUMBER["minus"])
STRUCTURE: Mapping[str, Mapping[str, str]] = {
    OPEN: {"{": KEY},
    KEY: {'"': STRING},
    NEXT_KEY: {'"': STRING},
    COLON: {":": VALUE},
}
"""Outside of values: state -> what may come, blanks and brackets aside -> the next state."""


class ObjectScan(msgspec.Struct):
    """at      what is expected, or what is being read
    stack   open brackets
    is_key  the string at hand is a key
    rest    of a word, the letters that must follow; of a \\u, one sign per digit to come
    """

    at: str = OPEN
    stack: str = ""
    is_key: bool = False
    rest: str = ""

    @property
    def is_blank(self) -> bool:
        """Nothing but blanks so far."""
        return self.at == OPEN

    @property
    def is_object(self) -> bool:
        return self.at == END

    def push(self, text: str) -> None:
        position = 0
        while position < len(text) and self.at != BROKEN:
            match self.at:
                case "string":
                    position = self._string(text, past(PLAIN, text, position))
                case "escape" | "hex" | "word":
                    self._letter(text[position])
                    position += 1
                case at if at in NUMBER:
                    position += self._digit(text[position])
                case _:
                    position = past(BLANKS, text, position)
                    if position < len(text):
                        self._structural(text[position])
                        position += 1

    def _string(self, text: str, position: int) -> int:
        if position < len(text):
            match text[position]:
                case '"':
                    self.at = COLON if self.is_key else self._behind()
                case "\\":
                    self.at = ESCAPE
                case _:
                    self.at = BROKEN
        return position + 1

    def _letter(self, char: str) -> None:
        """One of an escape, or of a word."""
        match self.at:
            case "escape" if char == "u":
                self.at, self.rest = HEX, "...."
            case "escape":
                self.at = STRING if char in '"\\/bfnrt' else BROKEN
            case "hex":
                self.rest = self.rest[1:]
                done = HEX if self.rest else STRING
                self.at = done if char in HEX_DIGITS else BROKEN
            case _:
                is_right, self.rest = char == self.rest[0], self.rest[1:]
                done = WORD if self.rest else self._behind()
                self.at = done if is_right else BROKEN

    def _digit(self, char: str) -> int:
        """How many characters were read: none where the number has ended before this one."""
        then = NUMBER[self.at].get(char)
        if then is not None:
            self.at = then
            return 1
        self.at = self._behind() if self.at in WHOLE_NUMBERS else BROKEN
        return 0

    def _structural(self, char: str) -> None:
        """One character outside strings, words and numbers that is no blank."""
        at = self.at
        if at in (VALUE, FIRST) and not (at == FIRST and char == "]"):
            self._begin(char)
        elif at == COMMA and char == ",":
            self.at = NEXT_KEY if self.stack[-1] == "{" else VALUE
        elif at in (COMMA, KEY, FIRST) and char in "}]":
            is_right = self.stack[-1:] == ("{" if char == "}" else "[")
            self.stack = self.stack[:-1]
            self.at = self._behind() if is_right else BROKEN
        else:
            self.at = STRUCTURE.get(at, {}).get(char, BROKEN)
            self.is_key = at in (KEY, NEXT_KEY)
            if at == OPEN and self.at == KEY:
                self.stack = "{"

    def _begin(self, char: str) -> None:
        """A value."""
        if char in "{[" and len(self.stack) < MAX_DEPTH:
            self.stack += char
            self.at = KEY if char == "{" else FIRST
        elif char == '"':
            self.at, self.is_key = STRING, False
        elif char in WORDS:
            self.at, self.rest = WORD, WORDS[char]
        else:
            self.at = BEGINS_NUMBER.get(char, BROKEN)

    def _behind(self) -> str:
        """The state behind a value."""
        return COMMA if self.stack else END
