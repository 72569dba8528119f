"""Nested values that are not JSON, rewritten as JSON while they are read.

`LiteralWriter` receives the value's tokens in order and writes JSON. It places commas and quotes,
so a syntax only has to find its tokens. `PythonScan` finds the tokens of Python's literals: strings
with either quote, one or three of them, and their escapes; numbers; True, False, None; lists,
tuples, dicts. Nothing is evaluated. A word that is neither number nor constant is a string: models
write enumerations so.

A number is rewritten if JSON writes it differently (`007`, `.5`, `1_000`, `0x1f`). Long numbers are
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
    """Return a number as JSON writes it; None if `text` is not a number, or not whole if
    `whole`.
    """
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
    """Return the JSON of a bare word: a constant, a number, or else a string."""
    constant = CONSTANTS.get(word) or json_number(word)
    return constant if constant is not None else json.dumps(word, ensure_ascii=False)


class LiteralWriter(msgspec.Struct):
    """Structure of a value so far, and the JSON not drained yet.

    stack   open brackets, "[" or "{"
    want    the next element: "value", "key", "colon" or "comma"
    empty   the innermost bracket is empty
    comma   a comma was read, and is written before the next value
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
        """Start a key or value. Return whether one is allowed here."""
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
        """Close the innermost bracket with `bracket`."""
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
        """Write a value that is JSON already."""
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
        """Add to a string, in JSON's escapes."""
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
    """Position in a Python literal; fresh before its first character, blanks included.

    writer  the structure, and the JSON to be emitted
    quote   the quotes that end the current string; "" outside strings
    held    read but incomplete: part of a word, an escape or of quotes
    high    the first half of a character that is written as two escapes
    """

    writer: LiteralWriter = msgspec.field(default_factory=LiteralWriter)
    quote: str = ""
    held: str = ""
    high: str = ""

    @property
    def in_string(self) -> bool:
        """Whether the next text belongs to a string, unless it is a quote."""
        return bool(self.quote) or self.held in ("'", '"')

    def scan(self, text: str, start: int = 0, *, final: bool = False) -> tuple[int, Status]:
        """Read on from `start`. Return (the position reached, the status).

        A value ends after its last character, a bare word before the next one. A broken value is
        broken at that position. With `final` no text follows.
        """
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
        """Read one character outside strings and words."""
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
        """After the first quote, decide between one quote, three quotes and an empty string."""
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
        """Read quotes inside a string, which ends after as many as it started with."""
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
        """Read one more character after a backslash."""
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
        """Write a character code that broke off before its last digit as it stands."""
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
    """Return a complete Python literal as JSON, or None if it is not one."""
    scan = PythonScan()
    position, status = scan.scan(text, final=True)
    if status != "end" or text[position:].strip():
        return None
    return scan.writer.take()
