"""Nested values that are not JSON, rewritten as JSON while they are read.

`LiteralWriter` takes the value's tokens in order and tells JSON: it knows where commas and quotes
belong, so all that writes values in another way only has to find its tokens. `PythonScan` finds
those of Python's literals: strings with either quote, one or three of them, and their escapes;
numbers; True, False, None; lists, tuples, dicts. Nothing is evaluated. A word that is neither
number nor constant is a string: models write enumerations so.

A number is rewritten where JSON writes it differently (`007`, `.5`, `1_000`, `0x1f`); long ones are
never computed, so time is linear in the text.
"""

from __future__ import annotations

import json
import re
from typing import Literal

import msgspec

from gateway.text.markers import match_end

Status = Literal["more", "end", "broken"]

NUMBER = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]*+)(?P<point>\.[0-9]*+)?(?P<exponent>[eE][+-]?[0-9]++)?"
)
BASED = re.compile(r"(?P<sign>[+-]?)0(?:[xX][0-9a-fA-F]{1,32}|[oO][0-7]{1,32}|[bB][01]{1,64})")
CONSTANTS = {
    "True": "true", "False": "false", "None": "null",
    "true": "true", "false": "false", "null": "null",
}  # fmt: skip


def json_number(text: str, *, whole: bool = False) -> str | None:
    """A number as JSON writes it; None where `text` is none, or no whole one where one is due."""
    text = text.replace("_", "") if "__" not in text and text[-1:] != "_" else text
    if BASED.fullmatch(text):
        return str(int(text, 0))
    match = NUMBER.fullmatch(text)
    if match is None or not (match["whole"] or (match["point"] or ".") != "."):
        return None
    digits = match["whole"].lstrip("0") or "0"
    point, exponent = match["point"] or "", match["exponent"] or ""
    if whole:
        if exponent or point.strip(".0"):
            return None
        point = ""
    sign = "-" if match["sign"] == "-" else ""
    return sign + digits + (point if point != "." else "") + exponent


def scalar_json(word: str) -> str:
    """A bare word: a constant, a number, or else a string."""
    constant = CONSTANTS.get(word) or json_number(word)
    return constant if constant is not None else json.dumps(word, ensure_ascii=False)


class LiteralWriter(msgspec.Struct):
    """A value's structure so far, and the JSON not yet taken.

    stack   open brackets, "[" or "{"
    want    what may come: "value", "key", "colon" or "comma"
    empty   nothing stands in the innermost bracket
    comma   one was read, and is told before the next value
    quoted  inside a string
    """

    stack: list[str] = []
    want: str = "value"
    empty: bool = True
    comma: bool = False
    quoted: bool = False
    out: list[str] = []

    def take(self) -> str:
        text = "".join(self.out)
        self.out.clear()
        return text

    @property
    def done(self) -> bool:
        return not self.stack and self.want == "comma"

    def _starts(self) -> bool:
        """A key or value starts; whether it may."""
        if self.want not in ("value", "key"):
            return False
        if self.comma:
            self.out.append(", ")
            self.comma = False
        self.empty = False
        return True

    def _ended(self) -> None:
        self.want = "colon" if self.want == "key" else "comma"

    def open(self, bracket: str) -> bool:
        if self.want != "value" or not self._starts():
            return False
        self.stack.append(bracket)
        self.out.append(bracket)
        self.want, self.empty = ("key" if bracket == "{" else "value"), True
        return True

    def close(self, bracket: str) -> bool:
        """`bracket` is the closing one."""
        opening = "{" if bracket == "}" else "["
        may = self.want == "comma" or self.empty or self.comma
        if not self.stack or self.stack[-1] != opening or not may:
            return False
        self.stack.pop()
        self.out.append(bracket)
        self.want, self.empty, self.comma = "comma", False, False
        return True

    def separator(self, char: str) -> bool:
        if char == ":" and self.want == "colon":
            self.out.append(": ")
            self.want = "value"
            return True
        if char == "," and self.want == "comma" and self.stack:
            self.comma = True
            self.want = "key" if self.stack[-1] == "{" else "value"
            return True
        return False

    def scalar(self, word: str) -> bool:
        is_key = self.want == "key"
        if not self._starts():
            return False
        self.out.append(json.dumps(word, ensure_ascii=False) if is_key else scalar_json(word))
        self._ended()
        return True

    def raw(self, text: str) -> bool:
        """A value that is JSON already."""
        if self.want != "value" or not self._starts():
            return False
        self.out.append(text)
        self._ended()
        return True

    def begin_string(self) -> bool:
        if not self._starts():
            return False
        self.out.append('"')
        self.quoted = True
        return True

    def string(self, text: str) -> None:
        self.out.append(json.dumps(text, ensure_ascii=False)[1:-1])

    def json_string(self, text: str) -> None:
        """More of a string, as it stands inside a JSON string."""
        self.out.append(text)

    def end_string(self) -> None:
        self.out.append('"')
        self.quoted = False
        self._ended()


SPACE = re.compile(r"[ \t\r\n]*+")
WORD = re.compile(r"[^\s,:=()\[\]{}'\"]*+")
PLAIN = {"'": re.compile(r"[^'\\]*+"), '"': re.compile(r'[^"\\]*+')}
ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
CODE_LENGTH = {"x": 2, "u": 4, "U": 8}
BRACKETS = {"[": "[", "(": "[", "{": "{", "]": "]", ")": "]", "}": "}"}
PREFIXES = frozenset({"r", "b", "f", "u", "R", "B", "F", "U"})


class PythonScan(msgspec.Struct):
    """A Python literal's position. Fresh before its first character, blanks included.

    writer  the structure, and what is to be told
    quote   the quotes that end the string at hand; "" outside strings
    held    read, but not understood yet: part of a word, an escape or of quotes
    high    the first half of a character that is written as two escapes
    """

    writer: LiteralWriter = msgspec.field(default_factory=LiteralWriter)
    quote: str = ""
    held: str = ""
    high: str = ""

    @property
    def in_string(self) -> bool:
        """What comes next is text of a string, whatever it is, unless it is a quote."""
        return bool(self.quote) or self.held in ("'", '"')

    def scan(self, text: str, start: int = 0, *, final: bool = False) -> tuple[int, Status]:
        """Read on from `start`; (where it stopped, why). A value ends behind its last character,
        a bare word before the next; what is broken is broken at that position. With `final`
        nothing follows the text."""
        position = start
        while position < len(text):
            if self.quote:
                position = self._in_string(text, position)
            elif self.held:
                position, ok = self._in_held(text, position)
                if not ok:
                    return position, "broken"
            else:
                position = match_end(SPACE, text, position)
                if position == len(text):
                    break
                if not self._token(text[position]):
                    return position, "broken"
                position += 1
            if self.writer.done and not self.quote:
                return position, "end"
        if final and self.held and not self.quote:
            ok = self._finish_held()
            return position, "end" if ok and self.writer.done else "broken"
        return position, "more"

    def _token(self, char: str) -> bool:
        """One character outside strings and words."""
        writer = self.writer
        if char in "'\"":
            self.held = char  # one quote, or the first of three
            return writer.begin_string()
        if char in "[({":
            return writer.open(BRACKETS[char])
        if char in "])}":
            return writer.close(BRACKETS[char])
        if char in ",:":
            return writer.separator(char)
        if char == "=" or writer.want not in ("value", "key"):
            return False
        self.held = char
        return True

    def _in_held(self, text: str, position: int) -> tuple[int, bool]:
        if self.held[0] in "'\"":
            return self._quotes(text, position), True
        end = match_end(WORD, text, position)
        self.held += text[position:end]
        if end == len(text):
            return end, len(self.held) <= 4096
        if text[end] in "'\"" and self.held in PREFIXES:
            self.held = ""
            return end, True
        return end, self._finish_held()

    def _finish_held(self) -> bool:
        held, self.held = self.held, ""
        if held[0] in "'\"":  # the two quotes of an empty string
            self.writer.end_string()
            return len(held) == 2
        return self.writer.scalar(held)

    def _quotes(self, text: str, position: int) -> int:
        """Behind the first quote of a string: is it one, three, or an empty string?"""
        char = text[position]
        if char == self.held[0]:
            self.held += char
            if len(self.held) == 3:
                self.quote, self.held = self.held, ""
            return position + 1
        if len(self.held) == 2:
            self.held = ""
            self.writer.end_string()
        else:
            self.quote, self.held = self.held, ""
        return position

    # ---- inside a string

    def _in_string(self, text: str, position: int) -> int:
        if self.held and self.held[0] == "\\":
            return self._escape(text, position)
        if self.held:
            return self._closing(text, position)
        end = match_end(PLAIN[self.quote[0]], text, position)
        if end > position:
            self._tell(text[position:end])
        if end < len(text):
            if text[end] == "\\":
                self.held = "\\"
            else:
                return self._closing(text, end)
            return end + 1
        return end

    def _closing(self, text: str, position: int) -> int:
        """Quotes inside a string: its end once there are as many as at its beginning."""
        if text[position] == self.quote[0]:
            self.held += text[position]
            if self.held == self.quote:
                self._tell("")
                self.quote = self.held = ""
                self.writer.end_string()
            return position + 1
        held, self.held = self.held, ""
        self._tell(held)
        return position

    def _escape(self, text: str, position: int) -> int:
        """One more character behind a backslash."""
        self.held += text[position]
        kind, digits = self.held[1], self.held[2:]
        if kind in CODE_LENGTH:
            if digits and digits[-1] not in "0123456789abcdefABCDEF":
                self._verbatim()
                return position
            if len(digits) == CODE_LENGTH[kind]:
                self._code(int(digits, 16))
        elif kind in "01234567":
            if self.held[-1] not in "01234567":
                value, self.held = int(self.held[1:-1], 8), ""
                self._tell(chr(value))
                return position
            if len(self.held) == 4:
                self._code(int(self.held[1:], 8))
        elif kind in ESCAPES:
            self.held = ""
            self._tell(ESCAPES[kind])
        else:
            held, self.held = self.held, ""
            self._tell(held)
        return position + 1

    def _verbatim(self) -> None:
        """What looked like the code of a character, and broke off before its last character."""
        held, self.held = self.held[:-1], ""
        self._tell(held)

    def _code(self, value: int) -> None:
        raw, self.held = self.held, ""
        if 0xD800 <= value < 0xDC00:
            self._tell("")
            self.high = chr(value)
        elif 0xDC00 <= value < 0xE000 and self.high:
            pair, self.high = ord(self.high), ""
            self._tell(chr(0x10000 + ((pair - 0xD800) << 10) + value - 0xDC00))
        elif 0xDC00 <= value < 0xE000 or value > 0x10FFFF:
            self._tell(raw)
        else:
            self._tell(chr(value))

    def _tell(self, text: str) -> None:
        if self.high:
            text, self.high = f"\\u{ord(self.high):04x}" + text, ""
        if text:
            self.writer.string(text)


def literal_to_json(text: str) -> str | None:
    """A complete Python literal as JSON; None where it is none."""
    scan = PythonScan()
    position, status = scan.scan(text, final=True)
    if status != "end" or text[position:].strip():
        return None
    return scan.writer.take()
