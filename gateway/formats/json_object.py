r"""Checks whether a streamed text is one JSON object, and repairs text that can only be meant as
one.

These mistakes of models are repaired:

    a line break or another control character in a string   escaped
    a backslash that starts no escape (`\d`)                 doubled; but `\'` is an apostrophe
    True, False, None                                         rewritten as in JSON
    a comma before a closing bracket                          removed
    a missing last brace                                      added by `finish`

Everything else that is not JSON stays unchanged. For text that needs no repair the verdict equals
that of `json.loads`, for any cut, in linear time, except that an object nested deeper than
MAX_DEPTH is rejected. (`json.loads` accepts it, or fails, as the stack allows.) The state is plain
data: the open brackets and little else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import msgspec

from gateway.text.markers import match_end

MAX_DEPTH = 500

OPEN, BROKEN, END = "open", "broken", "end"
VALUE, FIRST, KEY, NEXT_KEY, COLON, COMMA = "value", "first", "key", "next key", "colon", "comma"
STRING, ESCAPE, HEX, WORD = "string", "escape", "hex", "word"

PLAIN = re.compile(r'[^"\\\x00-\x1f]*+')
BLANKS = re.compile(r"[ \t\r\n]*+")
WORDS = {
    "true": "true", "false": "false", "null": "null",
    "True": "true", "False": "false", "None": "null",
}  # fmt: skip
"""A word that is a value -> its spelling in JSON."""
BEGINS_WORD = {word[0]: word for word in WORDS}
ESCAPED = {"'": "'"} | {letter: "\\" + letter for letter in '"\\/bfnrt'}
"""The letter after a backslash -> the escape in JSON."""
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
"""Outside of values: state -> characters that may come, blanks and brackets aside -> the next
state.
"""


class ObjectScan(msgspec.Struct):
    r"""Position in a JSON object.

    at      the expected or current element
    stack   open brackets
    is_key  the current string is a key
    rest    letters of a word that must follow; for a \u, one character per digit to come
    held    read but not returned: the start of an escape or of a word, or a comma and the blanks
            after it
    """

    at: str = OPEN
    stack: str = ""
    is_key: bool = False
    rest: str = ""
    held: str = ""

    @property
    def is_blank(self) -> bool:
        """Whether the text so far is blank."""
        return self.at == OPEN

    @property
    def is_object(self) -> bool:
        return self.at == END

    def push(self, text: str) -> str:
        """Return the repaired text that is certain. After text that cannot be repaired, all is
        verbatim.
        """
        position = 0
        out: list[str] = []
        while position < len(text) and self.at != BROKEN:
            match self.at:
                case "string":
                    position = self._string(text, position, out)
                case "escape" | "hex":
                    position += self._escape(text[position], out)
                case "word":
                    position += self._word(text[position], out)
                case at if at in NUMBER:
                    position += self._digit(text[position], out)
                case _:
                    position = self._between(text, position, out)
        if self.at == BROKEN:
            out += [self.held, text[position:]]
            self.held = ""
        return "".join(out)

    def finish(self) -> str:
        """Return the rest: if an object lacks only its last brace, that brace."""
        if self.at in WHOLE_NUMBERS:
            self.at = self._behind()
        if self.at == COMMA and self.stack == "{":
            self.at, self.stack = END, ""
            return "}"
        held, self.held = self.held, ""
        return held

    # ---- strings

    def _string(self, text: str, position: int, out: list[str]) -> int:
        end = match_end(PLAIN, text, position)
        out.append(text[position:end])
        if end == len(text):
            return end
        char = text[end]
        if char == '"':
            self.at = COLON if self.is_key else self._behind()
            out.append(char)
        elif char == "\\":
            self.at, self.held = ESCAPE, char
        else:
            out.append(json.dumps(char)[1:-1])
        return end + 1

    def _escape(self, char: str, out: list[str]) -> int:
        """Read one more character of an escape. Return how many characters were read."""
        if self.at == ESCAPE and char == "u":
            self.at, self.rest = HEX, "...."
        elif self.at == ESCAPE and char in ESCAPED:
            out.append(ESCAPED[char])
            self.at, self.held = STRING, ""
            return 1
        elif self.at == HEX and char in HEX_DIGITS:
            self.rest = self.rest[1:]
        else:
            out.append("\\" + self.held)
            self.at, self.held = STRING, ""
            return 0
        self.held += char
        if not self.rest:
            out.append(self.held)
            self.at, self.held = STRING, ""
        return 1

    # ---- words and numbers

    def _word(self, char: str, out: list[str]) -> int:
        if char != self.rest[0]:
            self.at = BROKEN
            return 0
        self.held, self.rest = self.held + char, self.rest[1:]
        if not self.rest:
            out.append(WORDS[self.held])
            self.held, self.at = "", self._behind()
        return 1

    def _digit(self, char: str, out: list[str]) -> int:
        """Return how many characters were read: 0 if the number ended before this one."""
        then = NUMBER[self.at].get(char)
        if then is not None:
            self.at = then
            out.append(char)
            return 1
        self.at = self._behind() if self.at in WHOLE_NUMBERS else BROKEN
        return 0

    # ---- structure

    def _between(self, text: str, position: int, out: list[str]) -> int:
        """Read blanks, and one other character outside strings, words and numbers."""
        end = match_end(BLANKS, text, position)
        if self.held:
            self.held += text[position:end]
        else:
            out.append(text[position:end])
        if end == len(text):
            return end
        self._structural(text[end])
        if self.at == BROKEN:
            return end
        if text[end] in "}]":
            out.append(self.held.removeprefix(","))
            self.held = ""
        if self.at == WORD or (text[end] == "," and self.at in (VALUE, NEXT_KEY)):
            out.append(self.held)
            self.held = text[end]
        else:
            out += [self.held, text[end]]
            self.held = ""
        return end + 1

    def _structural(self, char: str) -> None:
        at = self.at
        if char in "}]" and (at in (COMMA, KEY, FIRST) or self.held):
            is_right = self.stack[-1:] == ("{" if char == "}" else "[")
            self.stack = self.stack[:-1]
            self.at = self._behind() if is_right else BROKEN
        elif at in (VALUE, FIRST):
            self._begin(char)
        elif at == COMMA and char == ",":
            self.at = NEXT_KEY if self.stack[-1] == "{" else VALUE
        else:
            self.at = STRUCTURE.get(at, {}).get(char, BROKEN)
            self.is_key = at in (KEY, NEXT_KEY)
            if at == OPEN and self.at == KEY:
                self.stack = "{"

    def _begin(self, char: str) -> None:
        """Start a value."""
        if char in "{[" and len(self.stack) < MAX_DEPTH:
            self.stack += char
            self.at = KEY if char == "{" else FIRST
        elif char == '"':
            self.at, self.is_key = STRING, False
        elif char in BEGINS_WORD:
            self.at, self.rest = WORD, BEGINS_WORD[char][1:]
        else:
            self.at = BEGINS_NUMBER.get(char, BROKEN)

    def _behind(self) -> str:
        """Return the state after a value."""
        return COMMA if self.stack else END


def mended_object(text: str) -> str | None:
    """Return a whole text as a JSON object, or None if it cannot be one."""
    scan = ObjectScan()
    mended = scan.push(text) + scan.finish()
    return mended if scan.is_object else None
