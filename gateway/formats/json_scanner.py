r"""The incremental scanner of literals, as JSON, Python and other syntaxes spell them.

`LiteralScan` reads one value in a `Dialect` and writes it as JSON. The result does not depend on
how the text is cut, and takes linear time. Nothing is evaluated, and long numbers are never
computed.

JSON is passed on unchanged. Some mistakes that models make in JSON have only one plausible meaning,
and are repaired:

    a line break or another control character in a string   is escaped
    a backslash that starts no escape (`\d`)                 is doubled; but `\'` is an apostrophe
    True, False, None                                         are rewritten as in JSON
    a comma before a closing bracket                          is removed
    a missing last brace                                      is added by `finish`

After any other mistake the rest of the text stays unchanged. A text without mistakes is accepted if
`json.loads` accepts it, except that JSON nested deeper than MAX_DEPTH is rejected.

Other dialects are rewritten. Strings get JSON's escapes. Numbers that JSON spells differently
(`007`, `.5`, `1_000`, `0x1f`) get JSON's form. A word that is neither a number nor a constant
becomes a string, because models write enumerations without quotes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from gateway.formats.json_spelling import (
    BEGINS_CONSTANT,
    BEGINS_NUMBER,
    CONSTANTS,
    ENDS_NUMBER,
    NUMBER_PARTS,
    SPACE,
    string_json,
    word_json,
)
from gateway.formats.literal_dialect import JSON, Dialect
from gateway.formats.readable_json import ReadableCheck
from gateway.text.markers import match_end

Status = Literal["more", "end", "broken", "quote"]
"""Result of a scan: the value continues, it has ended, it cannot continue with the character at
this position, or a string starts here that the caller reads.
"""

MAX_DEPTH = 500
"""Largest number of open brackets in JSON."""

# States of a scan between tokens
OBJECT = "object"  # before an object
VALUE = "value"  # before a value
FIRST = "first"  # before the first value of an array, or its end
NEXT_VALUE = "next value"  # after a comma in an array
KEY = "key"  # before the first key of an object, or its end
NEXT_KEY = "next key"  # after a comma in an object
COLON = "colon"  # after a key
COMMA = "comma"  # after a value in a bracket
END = "end"  # after the value
BROKEN = "broken"  # after text that cannot be repaired
# States of a scan inside a token
STRING = "string"  # in a string
ESCAPE = "escape"  # after a backslash in a string
QUOTES = "quotes"  # after one or two quotes, which may become three
CLOSING = "closing"  # after one or two quotes in a string that ends with three
AFTER_STRING = "after string"  # after a string that another one may continue
QUOTED = "quoted"  # in a string that the caller reads
WORD = "word"  # in a bare word; the parts of JSON's numbers are in NUMBER_PARTS

KEYS, VALUES = frozenset({KEY, NEXT_KEY}), frozenset({OBJECT, VALUE, FIRST, NEXT_VALUE})
CLOSABLE = frozenset({COMMA, KEY, FIRST, NEXT_KEY, NEXT_VALUE})
STOPS: Mapping[str, Status] = {END: "end", BROKEN: "broken", QUOTED: "quote"}
AFTER_BRACKET = {"{": KEY, "(": KEY, "[": FIRST}
AFTER_COMMA = {"{": NEXT_KEY, "(": NEXT_KEY, "[": NEXT_VALUE}
JSON_BRACKETS = {"{": "{}", "(": "{}", "[": "[]"}
IN_QUOTES = {"'": re.compile(r"[^'\\]*+"), '"': re.compile(r'[^"\\]*+')}
HEX_DIGITS, OCTAL_DIGITS = "0123456789abcdefABCDEF", "01234567"


class LiteralScan(msgspec.Struct):
    """An incremental reader of one literal, and the JSON written so far that has not been
    drained."""

    at: str = VALUE
    #: Symbols of the open brackets.
    stack: str = ""
    #: Whether the current token is a key.
    is_key: bool = False
    #: The last key of the outermost object that was written with `complete_key`.
    key: str = ""
    #: The quotes that end the current string.
    quote: str = ""
    #: Whether backslashes in the current string are text.
    raw: bool = False
    #: Text that has been read but not written: a comma (in JSON with the blanks after it), the
    #: start of an escape or of a JSON constant, or quotes.
    held: str = ""
    #: The bare word so far, in pieces.
    word: list[str] = []
    #: The first half of a surrogate pair whose second half has not been read.
    high: str = ""
    #: The JSON written since the last `drain`, in pieces.
    out: list[str] = []
    #: Finds values that JSON readers cannot hold. It checks JSON only, not other dialects.
    readable: ReadableCheck = msgspec.field(default_factory=ReadableCheck)

    @property
    def is_blank(self) -> bool:
        """Whether only blanks have been read. Use it only for a scan of an object."""
        return self.at == OBJECT

    @property
    def is_object(self) -> bool:
        """Whether the object is complete. Use it only for a scan of an object."""
        return self.at == END

    @property
    def in_string(self) -> bool:
        """Whether the next character belongs to a string, unless it is a quote."""
        return bool(self.quote) or (self.at == QUOTES and len(self.held) == 1)

    def drain(self) -> str:
        """Return the JSON that has been written since the last call."""
        text = "".join(self.out)
        self.out.clear()
        return text

    def drain_word(self) -> str:
        """Return the bare word that has been read but not written."""
        word, self.word = "".join(self.word), []
        return word

    def scan(self, text: str, dialect: Dialect, position: int = 0) -> tuple[int, Status]:
        """Scan `text` from `position`. Return (the position reached, the status).

        At the end of a value, the position is that after its last character. If the value is
        broken, it is that of the character that breaks it. A bare word ends only when the character
        after it is read.
        """
        while position < len(text):
            position = READERS[self.at](self, text, position, dialect)
            if self.at in STOPS:
                return position, STOPS[self.at]
        return position, "more"

    def scan_end(self) -> Status:
        """Complete a bare word or an empty string at the end of the text. Return the status."""
        is_open = self.at == QUOTES and len(self.held) == 1
        if self.at == WORD:
            self._end_word()
        elif self.at in (QUOTES, AFTER_STRING):
            self._end_string()
        else:
            return STOPS.get(self.at, "more")
        return "end" if self.at == END and not is_open else "broken"

    # ---- JSON

    def push(self, text: str) -> str:
        """Return the repaired JSON that is certain after `text`. Text that cannot be repaired is
        returned unchanged."""
        position, end = 0, len(text)
        while position < end and self.at != BROKEN:
            position = READERS[self.at](self, text, position, JSON)
        if self.at == BROKEN:
            self.out += [self.held, text[position:]]
            self.held = ""
        return self.drain()

    def finish(self) -> str:
        """Return the rest of the JSON at the end of the text: the held text, or the last brace if
        an object lacks only that."""
        if self.at in ENDS_NUMBER:
            self._ended()
        if self.at == COMMA and self.stack == "{":
            self.at, self.stack = END, ""
            return "}"
        held, self.held = self.held, ""
        return held

    # ---- between tokens

    def _between(self, text: str, position: int, dialect: Dialect) -> int:
        """Read blanks and the character after them, outside of tokens."""
        end = match_end(SPACE, text, position)
        is_json = dialect.word is None
        if is_json and self.held:
            self.held += text[position:end]
        elif is_json:
            self.out.append(text[position:end])
        if end == len(text):
            return end
        char, at = text[end], self.at
        if char == "," and at == COMMA:
            self.at, self.held = AFTER_COMMA[self.stack[-1]], "," if is_json else ", "
        elif char in dialect.colons and at == COLON:
            self.at = VALUE
            self.out.append(":" if is_json else ": ")
        elif char in dialect.closes:
            self._close(char, dialect)
        elif at in KEYS or at in VALUES:
            self.is_key = at in KEYS
            self._start(char, dialect)
        else:
            self.at = BROKEN
        return end if self.at in (BROKEN, WORD) else end + 1

    def _close(self, char: str, dialect: Dialect) -> None:
        symbol = self.stack[-1:]
        if self.at not in CLOSABLE or symbol not in dialect.closes[char]:
            self.at = BROKEN
            return
        blanks = self.held[1:] if dialect.word is None else ""
        self.out += [blanks, JSON_BRACKETS[symbol][1]]
        self.stack, self.held = self.stack[:-1], ""
        self._ended()

    def _start(self, char: str, dialect: Dialect) -> None:
        """Start the key or value that begins with `char`."""
        if char in dialect.opens:
            self._open(dialect.opens[char], dialect)
        elif self.at == OBJECT:
            self.at = BROKEN
        elif char in dialect.quotes:
            self._start_string(char, dialect)
        elif dialect.word is not None:
            self.at = WORD if match_end(self._word_chars(dialect), char) else BROKEN
        elif self.is_key:
            self.at = BROKEN
        elif char in BEGINS_CONSTANT:
            self.write_comma()
            self.at = WORD
        else:
            self.at = BEGINS_NUMBER.get(char, BROKEN)
            self.write_comma()
            self.out.append(char if self.at != BROKEN else "")
            self.readable.number_part(char)

    def _open(self, symbol: str, dialect: Dialect) -> None:
        is_too_deep = dialect.word is None and len(self.stack) >= MAX_DEPTH
        if self.is_key or is_too_deep or (self.at == OBJECT and symbol == "["):
            self.at = BROKEN
            return
        self.open(symbol)

    def write_comma(self) -> None:
        """Write the comma that was held back, now that no bracket closes after it."""
        if self.held:
            self.out.append(self.held)
            self.held = ""

    def _ended(self) -> None:
        """Enter the state after a complete key or value."""
        self.readable.end_value()
        self.at = COLON if self.is_key else COMMA if self.stack else END

    # ---- strings

    def _start_string(self, char: str, dialect: Dialect) -> None:
        self.write_comma()
        if dialect.outside_strings:
            self.at = QUOTED
            return
        self.out.append('"')
        if dialect.tripled:
            self.at, self.held = QUOTES, char
        else:
            self.at, self.quote = STRING, char

    def _in_string(self, text: str, position: int, dialect: Dialect) -> int:
        end = match_end(IN_QUOTES[self.quote[0]], text, position)
        if end > position:
            self._write(text[position:end])
        if end == len(text):
            return end
        if text[end] == "\\":
            self.at, self.held = ESCAPE, "\\"
        elif len(self.quote) == 1:
            self._close_string(dialect)
        else:
            self.at, self.held = CLOSING, text[end]
        return end + 1

    def _quotes(self, text: str, position: int, dialect: Dialect) -> int:
        """Read the character that decides between one quote, three quotes and an empty string."""
        if text[position] == self.held[0]:
            self.held += text[position]
            if len(self.held) == 3:
                self.at, self.quote, self.held = STRING, self.held, ""
            return position + 1
        if len(self.held) == 2:
            self._close_string(dialect)
        else:
            self.at, self.quote, self.held = STRING, self.held, ""
        return position

    def _closing(self, text: str, position: int, dialect: Dialect) -> int:
        """Read quotes in a string that ends with three quotes."""
        if text[position] == self.quote[0]:
            self.held += text[position]
            if self.held == self.quote:
                self._close_string(dialect)
            return position + 1
        held, self.held, self.at = self.held, "", STRING
        self._write(held)
        return position

    def _close_string(self, dialect: Dialect) -> None:
        self._write("")
        self.quote, self.held, self.raw = "", "", False
        if dialect.adjacent:
            self.at = AFTER_STRING
        else:
            self._end_string()

    def _end_string(self) -> None:
        self._write("")
        self.out.append('"')
        self.quote, self.held, self.raw = "", "", False
        self._ended()

    def _after_string(self, text: str, position: int, dialect: Dialect) -> int:
        """Read the character after a string. A quote starts another one, which is joined to it."""
        position = match_end(SPACE, text, position)
        if position == len(text):
            return position
        if text[position] in dialect.quotes:
            self.at, self.held = QUOTES, text[position]
            return position + 1
        self._end_string()
        return position

    def _escape(self, text: str, position: int, dialect: Dialect) -> int:
        """Read the character after a backslash, or a digit of a character's code."""
        if self.raw:
            self.at, self.held = STRING, ""
            self._write("\\" + text[position])
            return position + 1
        char, kind = text[position], self.held[1:2]
        is_octal = kind != "" and kind in OCTAL_DIGITS
        if not kind and char in dialect.escapes:
            self.at, self.held = STRING, ""
            self._write("")
            self.out.append(dialect.escapes[char])
            return position + 1
        if char in (OCTAL_DIGITS if is_octal else HEX_DIGITS if kind else dialect.codes):
            self.held += char
            if len(self.held) == 2 + dialect.codes[self.held[1]]:
                self._end_code(dialect)
            return position + 1
        if is_octal:
            self._end_code(dialect)
        else:  # not an escape, or a code without its last digits
            held, self.held, self.at = self.held, "", STRING
            self._write(held)
        return position

    def _end_code(self, dialect: Dialect) -> None:
        """Write the character of the escape sequence in `held`, which is complete."""
        raw, self.held, self.at = self.held, "", STRING
        code = int(raw[1:], 8) if raw[1] in OCTAL_DIGITS else int(raw[2:], 16)
        if dialect.word is None:
            self.readable.escaped_code(code)
            self.out.append(raw)
        elif 0xDC00 <= code < 0xE000 and self.high:
            pair, self.high = ord(self.high), ""
            self._write(chr(0x10000 + ((pair - 0xD800) << 10) + code - 0xDC00))
        elif 0xD800 <= code < 0xDC00:
            self._write("")
            self.high = chr(code)
        else:
            is_character = code <= 0x10FFFF and not 0xDC00 <= code < 0xE000
            self._write(chr(code) if is_character else raw)

    def _write(self, text: str) -> None:
        """Add `text` to the JSON string, after the held half of a surrogate pair as an escape."""
        self.readable.characters()
        if self.high:
            text, self.high = f"\\u{ord(self.high):04x}" + text, ""
        if text:
            self.out.append(string_json(text)[1:-1])

    # ---- words

    def _in_word(self, text: str, position: int, dialect: Dialect) -> int:
        if dialect.word is None:
            return self._in_constant(text, position)
        end = match_end(self._word_chars(dialect), text, position)
        self.word.append(text[position:end])
        most = dialect.max_word_chars
        if end == len(text):
            self.at = WORD if most is None or sum(map(len, self.word)) <= most else BROKEN
        elif text[end] in dialect.quotes and (w := self._short_word()) in dialect.prefixes:
            self.at, self.word, self.raw = (KEY if self.is_key else VALUE), [], "r" in w
        else:
            self._end_word()
        return end

    def _short_word(self) -> str:
        """Return the bare word so far in lower case, or "" if it is long."""
        return "".join(self.word).lower() if sum(map(len, self.word)) < 3 else ""

    def _word_chars(self, dialect: Dialect) -> re.Pattern[str]:
        """Return the characters of the current bare word, which may be a key."""
        assert dialect.word is not None
        return dialect.key if self.is_key and dialect.key is not None else dialect.word

    def _end_word(self) -> None:
        word = self.drain_word().strip(" \t\r\n")
        if self.is_key:
            self.complete_key(word)
        else:
            self.complete(word_json(word))

    def _in_constant(self, text: str, position: int) -> int:
        word = self.held + text[position]
        if word in CONSTANTS:
            self.out.append(CONSTANTS[word])
            self.held = ""
            self._ended()
        elif word in BEGINS_CONSTANT:
            self.held = word
        else:
            self.at = BROKEN
            return position
        return position + 1

    def _in_number(self, text: str, position: int, dialect: Dialect) -> int:
        """Pass on the characters that continue a JSON number."""
        start = position
        while position < len(text) and (part := NUMBER_PARTS[self.at].get(text[position])):
            self.at = part
            position += 1
        self.out.append(text[start:position])
        self.readable.number_part(text[start:position])
        if position < len(text):
            if self.at in ENDS_NUMBER:
                self._ended()
            else:
                self.at = BROKEN
        return position

    # ---- for callers that read the strings

    def open(self, symbol: str) -> None:
        """Open a bracket with this symbol. The caller has checked that a value may start here."""
        self.write_comma()
        self.stack += symbol
        self.out.append(JSON_BRACKETS[symbol][0])
        self.at = AFTER_BRACKET[symbol]

    def open_quoted(self) -> bool:
        """Start a string that the caller reads. Return False if no string may start here."""
        if self.at not in KEYS and self.at not in VALUES:
            return False
        self.is_key, self.at = self.at in KEYS, QUOTED
        return True

    def start_text(self) -> None:
        """Write the opening quote of a string that the caller reads and emits piece by piece."""
        self.write_comma()
        self.out.append('"')

    def text(self, text: str) -> None:
        """Write a piece of the string that the caller reads."""
        self._write(text)

    def complete_key(self, key: str) -> None:
        """Write a key as a JSON string. Keep a key of the outermost object in `key`, too."""
        if len(self.stack) == 1:
            self.key = key
        self.complete(string_json(key))

    def complete(self, value: str) -> None:
        """Write `value`, JSON of a whole key or value, or the closing quote of a string."""
        self.write_comma()
        self.out.append(value)
        self._ended()


READERS: Mapping[str, Callable[[LiteralScan, str, int, Dialect], int]] = {
    **dict.fromkeys((*KEYS, *VALUES, COLON, COMMA, END), LiteralScan._between),
    STRING: LiteralScan._in_string,
    ESCAPE: LiteralScan._escape,
    QUOTES: LiteralScan._quotes,
    AFTER_STRING: LiteralScan._after_string,
    CLOSING: LiteralScan._closing,
    WORD: LiteralScan._in_word,
    **dict.fromkeys(NUMBER_PARTS, LiteralScan._in_number),
}
"""State -> the method that continues to read in this state."""


def object_scan() -> LiteralScan:
    """Return a scan that reads a JSON object."""
    return LiteralScan(at=OBJECT)
