"""Whether a text that comes bit by bit is one JSON object, remembering no more than its open
brackets; and the same text, mended where it is none but can only be meant as one.

Mended are, as models write them:

    a line break or another control character in a string   escaped
    a backslash that begins no escape (`\\d`)                 doubled; but `\\'` is an apostrophe
    True, False, None                                         as JSON writes them
    a comma before a closing bracket                          left out
    a missing last brace                                      added by `finish`

Everything else that is no JSON stays as it stands. For text that needs no mending the verdict is
that of `json.loads`, for any cut, in linear time; but an object nested deeper than MAX_DEPTH is
none. (`json.loads` takes it, or fails, as the stack allows.) The memory is plain data.
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
"""Outside of values: state -> what may come, blanks and brackets aside -> the next state."""


class ObjectScan(msgspec.Struct):
    """at      what is expected, or what is being read
    stack   open brackets
    is_key  the string at hand is a key
    rest    of a word, the letters that must follow; of a \\u, one sign per digit to come
    held    read, and not returned: the beginning of an escape or of a word; or a comma and the
            blanks behind it
    """

    at: str = OPEN
    stack: str = ""
    is_key: bool = False
    rest: str = ""
    held: str = ""

    @property
    def is_blank(self) -> bool:
        """Nothing but blanks so far."""
        return self.at == OPEN

    @property
    def is_object(self) -> bool:
        return self.at == END

    def push(self, text: str) -> str:
        """What of the mended text is certain now. Behind what cannot be mended all is verbatim."""
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
        """The rest, once nothing more will come: of an object that lacks nothing but its last
        brace, that brace."""
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
        """One more letter of an escape, or none if it is not one; how many were read."""
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
        """How many characters were read: none where the number has ended before this one."""
        then = NUMBER[self.at].get(char)
        if then is not None:
            self.at = then
            out.append(char)
            return 1
        self.at = self._behind() if self.at in WHOLE_NUMBERS else BROKEN
        return 0

    # ---- structure

    def _between(self, text: str, position: int, out: list[str]) -> int:
        """Blanks, and one character outside strings, words and numbers that is none."""
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
        """A value."""
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
        """The state behind a value."""
        return COMMA if self.stack else END


def mended_object(text: str) -> str | None:
    """A whole text as a JSON object; None if it can be none."""
    scan = ObjectScan()
    mended = scan.push(text) + scan.finish()
    return mended if scan.is_object else None
