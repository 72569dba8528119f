r"""The incremental scanner of literals, as JSON, Python and other syntaxes spell them.

`LiteralScan` reads one value in a `Dialect` and writes it as JSON, however the text is cut and in
linear time. Nothing is evaluated, and long numbers are never computed.

JSON is passed on as it stands. These mistakes of models, which can only be meant as JSON, are
repaired; after anything else that is not JSON, the rest stays unchanged:

    a line break or another control character in a string   escaped
    a backslash that starts no escape (`\d`)                 doubled; but `\'` is an apostrophe
    True, False, None                                         rewritten as in JSON
    a comma before a closing bracket                          removed
    a missing last brace                                      added by `finish`

For text that needs no repair the verdict equals that of `json.loads`, except that JSON nested
deeper than MAX_DEPTH is rejected. (`json.loads` accepts it, or fails, as the stack allows.)

Other dialects are rewritten: strings have JSON's escapes, and so have numbers that JSON spells
differently (`007`, `.5`, `1_000`, `0x1f`) JSON's form. A word that is neither number nor constant
is a string, because models write enumerations so.

`JsonExtent` only finds the end of a JSON value, valid or not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from json.encoder import encode_basestring
from typing import Literal

import msgspec

from gateway.text.markers import match_end

string_json: Callable[[str], str] = encode_basestring
"""Returns a text as a JSON string."""

Status = Literal["more", "end", "broken", "quote"]
"""The value continues; it has ended; it cannot continue with the text at this position; the caller
reads a string that starts here.
"""

MAX_DEPTH = 500
"""Number of open brackets that JSON may have."""

SPACE = re.compile(r"[ \t\r\n]*+")
PLAIN = re.compile(r'[^"\\\x00-\x1f]*+')
"""Text of a JSON string that is passed on as it stands."""

CONSTANTS = {
    "true": "true", "false": "false", "null": "null",
    "True": "true", "False": "false", "None": "null",
}  # fmt: skip
"""A word that is a value -> its spelling in JSON."""
BEGINS_CONSTANT = frozenset(word[:n] for word in CONSTANTS for n in range(1, len(word)))


# ---- numbers

NUMBER = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]*+)(?P<point>\.[0-9]*+)?(?P<exponent>[eE][+-]?[0-9]++)?"
)
BASED = re.compile(r"(?P<sign>[+-]?)0(?:[xX][0-9a-fA-F]{1,32}|[oO][0-7]{1,32}|[bB][01]{1,64})")

_DIGITS = "0123456789"
_DOT, _E = {".": "dot"}, {"e": "e", "E": "e"}
NUMBER_PARTS: Mapping[str, Mapping[str, str]] = {
    "minus": {"0": "zero"} | dict.fromkeys("123456789", "whole"),
    "zero": _DOT | _E,
    "whole": dict.fromkeys(_DIGITS, "whole") | _DOT | _E,
    "dot": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": dict.fromkeys(_DIGITS, "fraction") | _E,
    "e": dict.fromkeys(_DIGITS, "exponent") | {"+": "sign", "-": "sign"},
    "sign": dict.fromkeys(_DIGITS, "exponent"),
    "exponent": dict.fromkeys(_DIGITS, "exponent"),
}
"""Part of a JSON number -> the next character -> the next part."""
ENDS_NUMBER = frozenset({"zero", "whole", "fraction", "exponent"})
BEGINS_NUMBER = {"-": "minus"} | dict(NUMBER_PARTS["minus"])


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


def word_json(word: str) -> str:
    """Return the JSON of a bare word: a constant, a number, or else a string."""
    constant = CONSTANTS.get(word) or json_number(word)
    return constant if constant is not None else string_json(word)


# ---- dialects


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """How a syntax spells literals. A stack symbol is the bracket that JSON has at its place; `(`
    is an object between parentheses.
    """

    #: Opening bracket -> its symbol on the stack.
    opens: Mapping[str, str] = msgspec.field(default_factory=lambda: {"{": "{", "[": "["})
    #: Closing bracket -> the symbols that it closes.
    closes: Mapping[str, str] = msgspec.field(default_factory=lambda: {"}": "{", "]": "["})
    #: Characters that start a string.
    quotes: str = '"'
    #: Three quotes may stand for one.
    tripled: bool = False
    #: The caller reads the strings.
    outside_strings: bool = False
    #: Letter after a backslash -> its meaning inside a JSON string.
    escapes: Mapping[str, str] = {}
    #: Letter after a backslash -> number of digits of a character's code.
    codes: Mapping[str, int] = {}
    #: Characters of a bare word; None: JSON's constants and numbers are the only words.
    word: re.Pattern[str] | None = None
    #: Longest word that may have to wait for its end.
    max_word_chars: int | None = None
    #: Words that may stand before a quote without a meaning.
    prefixes: frozenset[str] = frozenset()


JSON = Dialect(
    escapes={"'": "'"} | {letter: "\\" + letter for letter in '"\\/bfnrt'}, codes={"u": 4}
)
PYTHON = Dialect(
    opens={"[": "[", "(": "[", "{": "{"},
    closes={"]": "[", ")": "[", "}": "{"},
    quotes="'\"",
    tripled=True,
    escapes={
        **{letter: "\\" + letter for letter in 'nrtbf\\"'},
        **{"'": "'", "v": "\\u000b", "a": "\\u0007", "\n": ""},
    },
    codes={"x": 2, "u": 4, "U": 8} | dict.fromkeys("01234567", 2),
    word=re.compile(r"[^ \t\r\n,:=()\[\]{}'\"]*+"),
    max_word_chars=4096,
    prefixes=frozenset("rbfuRBFU"),
)

# ---- the scanner

# Between tokens, a scan is
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
# and in a token
STRING = "string"  # in a string
ESCAPE = "escape"  # after a backslash in a string
QUOTES = "quotes"  # after one or two quotes, which may become three
CLOSING = "closing"  # after one or two quotes in a string that ends with three
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
    """Position in a literal, and the JSON that has not been taken yet."""

    at: str = VALUE
    #: Symbols of the open brackets.
    stack: str = ""
    #: The current token is a key.
    is_key: bool = False
    #: The last key of the outermost object, unless it was a string that the scan has read.
    key: str = ""
    #: Quotes that end the current string.
    quote: str = ""
    #: Read but not written: a comma (in JSON with the blanks after it), the start of an escape or
    #: of a JSON constant, or quotes.
    held: str = ""
    #: The bare word so far.
    word: list[str] = []
    #: The first half of a character that is written as two escapes.
    high: str = ""
    out: list[str] = []

    @property
    def is_blank(self) -> bool:
        """Whether the text of an object is blank so far."""
        return self.at == OBJECT

    @property
    def is_object(self) -> bool:
        """Whether an object is complete."""
        return self.at == END

    @property
    def in_string(self) -> bool:
        """Whether the next text belongs to a string, unless it is a quote."""
        return bool(self.quote) or (self.at == QUOTES and len(self.held) == 1)

    def take(self) -> str:
        """Return the JSON that has been written since the last call."""
        text = "".join(self.out)
        self.out.clear()
        return text

    def take_word(self) -> str:
        """Return the bare word that has been read and not written."""
        word, self.word = "".join(self.word), []
        return word

    def scan(self, text: str, dialect: Dialect, position: int = 0) -> tuple[int, Status]:
        """Scan from `position` on. Return (the position reached, the status).

        The position is that after a value's last character, or that of the character at which a
        value is broken. A bare word ends only when the character after it is found.
        """
        while position < len(text):
            position = READERS[self.at](self, text, position, dialect)
            if self.at in STOPS:
                return position, STOPS[self.at]
        return position, "more"

    def scan_end(self) -> Status:
        """Complete a bare word or an empty string: no text follows."""
        is_open = self.at == QUOTES and len(self.held) == 1
        if self.at == WORD:
            self._end_word()
        elif self.at == QUOTES:
            self._close_string()
        else:
            return STOPS.get(self.at, "more")
        return "end" if self.at == END and not is_open else "broken"

    # ---- JSON

    def push(self, text: str) -> str:
        """Return the repaired JSON that is certain. What cannot be repaired is verbatim."""
        position, end = 0, len(text)
        while position < end and self.at != BROKEN:
            position = READERS[self.at](self, text, position, JSON)
        if self.at == BROKEN:
            self.out += [self.held, text[position:]]
            self.held = ""
        return self.take()

    def finish(self) -> str:
        """Return the rest: if an object lacks only its last brace, that brace."""
        if self.at in ENDS_NUMBER:
            self._ended()
        if self.at == COMMA and self.stack == "{":
            self.at, self.stack = END, ""
            return "}"
        held, self.held = self.held, ""
        return held

    # ---- between tokens

    def _between(self, text: str, position: int, dialect: Dialect) -> int:
        """Read blanks and the sign after them."""
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
        elif char == ":" and at == COLON:
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
        """Start a key or value."""
        if char in dialect.opens:
            self._open(dialect.opens[char], dialect)
        elif self.at == OBJECT:
            self.at = BROKEN
        elif char in dialect.quotes:
            self._start_string(char, dialect)
        elif dialect.word is not None:
            self.at = WORD if match_end(dialect.word, char) else BROKEN
        elif self.is_key:
            self.at = BROKEN
        elif char in BEGINS_CONSTANT:
            self.write_comma()
            self.at = WORD
        else:
            self.at = BEGINS_NUMBER.get(char, BROKEN)
            self.write_comma()
            self.out.append(char if self.at != BROKEN else "")

    def _open(self, symbol: str, dialect: Dialect) -> None:
        is_too_deep = dialect.word is None and len(self.stack) >= MAX_DEPTH
        if self.is_key or is_too_deep or (self.at == OBJECT and symbol == "["):
            self.at = BROKEN
            return
        self.open(symbol)

    def write_comma(self) -> None:
        """Write the comma that was held back: no bracket closes after it."""
        if self.held:
            self.out.append(self.held)
            self.held = ""

    def _ended(self) -> None:
        """Complete a key or value."""
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
        if end > position and self.high:
            self._write(text[position:end])
        elif end > position:
            self.out.append(string_json(text[position:end])[1:-1])
        if end == len(text):
            return end
        if text[end] == "\\":
            self.at, self.held = ESCAPE, "\\"
        elif len(self.quote) == 1:
            self._close_string()
        else:
            self.at, self.held = CLOSING, text[end]
        return end + 1

    def _quotes(self, text: str, position: int, dialect: Dialect) -> int:
        """Decide between one quote, three quotes and an empty string."""
        if text[position] == self.held[0]:
            self.held += text[position]
            if len(self.held) == 3:
                self.at, self.quote, self.held = STRING, self.held, ""
            return position + 1
        if len(self.held) == 2:
            self._close_string()
        else:
            self.at, self.quote, self.held = STRING, self.held, ""
        return position

    def _closing(self, text: str, position: int, dialect: Dialect) -> int:
        """Read quotes in a string that ends with three of them."""
        if text[position] == self.quote[0]:
            self.held += text[position]
            if self.held == self.quote:
                self._close_string()
            return position + 1
        held, self.held, self.at = self.held, "", STRING
        self._write(held)
        return position

    def _close_string(self) -> None:
        self._write("")
        self.out.append('"')
        self.quote = self.held = ""
        self._ended()

    def _escape(self, text: str, position: int, dialect: Dialect) -> int:
        """Read the character after a backslash, or one of a character's code."""
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
        else:  # no escape, or a code that broke off before its last digit
            held, self.held, self.at = self.held, "", STRING
            self._write(held)
        return position

    def _end_code(self, dialect: Dialect) -> None:
        """Write the character whose code is held."""
        raw, self.held, self.at = self.held, "", STRING
        if dialect.word is None:
            self.out.append(raw)
            return
        code = int(raw[1:], 8) if raw[1] in OCTAL_DIGITS else int(raw[2:], 16)
        if 0xDC00 <= code < 0xE000 and self.high:
            pair, self.high = ord(self.high), ""
            self._write(chr(0x10000 + ((pair - 0xD800) << 10) + code - 0xDC00))
        elif 0xD800 <= code < 0xDC00:
            self._write("")
            self.high = chr(code)
        else:
            is_character = code <= 0x10FFFF and not 0xDC00 <= code < 0xE000
            self._write(chr(code) if is_character else raw)

    def _write(self, text: str) -> None:
        """Add text to the string, after a first half that has no second one."""
        if self.high:
            text, self.high = f"\\u{ord(self.high):04x}" + text, ""
        if text:
            self.out.append(string_json(text)[1:-1])

    # ---- words

    def _in_word(self, text: str, position: int, dialect: Dialect) -> int:
        if dialect.word is None:
            return self._in_constant(text, position)
        end = match_end(dialect.word, text, position)
        self.word.append(text[position:end])
        most = dialect.max_word_chars
        if end == len(text):
            self.at = WORD if most is None or sum(map(len, self.word)) <= most else BROKEN
        elif text[end] in dialect.quotes and "".join(self.word) in dialect.prefixes:
            self.at, self.word = (KEY if self.is_key else VALUE), []
        else:
            self._end_word()
        return end

    def _end_word(self) -> None:
        word = self.take_word().strip(" \t\r\n")
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
        """Pass on a JSON number as far as it goes."""
        start = position
        while position < len(text) and (part := NUMBER_PARTS[self.at].get(text[position])):
            self.at = part
            position += 1
        self.out.append(text[start:position])
        if position < len(text):
            if self.at in ENDS_NUMBER:
                self._ended()
            else:
                self.at = BROKEN
        return position

    # ---- for callers that read the strings

    def open(self, symbol: str) -> None:
        """Open a bracket where one is allowed."""
        self.write_comma()
        self.stack += symbol
        self.out.append(JSON_BRACKETS[symbol][0])
        self.at = AFTER_BRACKET[symbol]

    def open_quoted(self) -> bool:
        """Start a string that the caller reads. Return whether one is allowed."""
        if self.at not in KEYS and self.at not in VALUES:
            return False
        self.is_key, self.at = self.at in KEYS, QUOTED
        return True

    def start_text(self) -> None:
        """Start to write the string that the caller reads as it comes."""
        self.write_comma()
        self.out.append('"')

    def text(self, text: str) -> None:
        self._write(text)

    def complete_key(self, key: str) -> None:
        if len(self.stack) == 1:
            self.key = key
        self.complete(string_json(key))

    def complete(self, value: str) -> None:
        """Write a key or value as JSON."""
        self.write_comma()
        self.out.append(value)
        self._ended()


READERS: Mapping[str, Callable[[LiteralScan, str, int, Dialect], int]] = {
    **dict.fromkeys((*KEYS, *VALUES, COLON, COMMA, END), LiteralScan._between),
    STRING: LiteralScan._in_string,
    ESCAPE: LiteralScan._escape,
    QUOTES: LiteralScan._quotes,
    CLOSING: LiteralScan._closing,
    WORD: LiteralScan._in_word,
    **dict.fromkeys(NUMBER_PARTS, LiteralScan._in_number),
}
"""State -> the method that reads on."""


def object_scan() -> LiteralScan:
    """Return a scan of a JSON object."""
    return LiteralScan(at=OBJECT)


def mended_object(text: str) -> str | None:
    """Return a whole text as a JSON object, or None if it cannot be one."""
    scan = object_scan()
    mended = scan.push(text) + scan.finish()
    return mended if scan.is_object else None


def python_to_json(text: str) -> str | None:
    """Return a complete Python literal as JSON, or None if it is not one."""
    scan = LiteralScan()
    position, status = scan.scan(text, PYTHON)
    if status == "more":
        status = scan.scan_end()
    if status != "end" or text[position:].strip():
        return None
    return scan.take()


# ---- the end of a value

IN_STRING = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
STRUCTURE = re.compile(r"[^\s0-9A-Za-z+\-.,:]")
SCALAR_END = re.compile(r"[^0-9A-Za-z+\-.]")


class JsonExtent(msgspec.Struct):
    """Position in one value whose end is searched for; fresh before its first non-blank character.

    Strings, escapes and depth are tracked, so nothing inside a string ends the value. It stops at
    a character that JSON does not allow outside strings; the caller decides about that.

    kind     "" before, then "nested", "string" or "scalar"
    depth    number of open brackets
    quoted   inside a string
    escaped  the text so far ends with a backslash whose escape is incomplete
    """

    kind: str = ""
    depth: int = 0
    quoted: bool = False
    escaped: bool = False

    def scan(self, text: str, position: int = 0) -> tuple[int, Status]:
        """Read on from `position`. Return (the position reached, the status).

        A scalar ends before the next character, a string or bracketed value after its last. A
        broken value is broken at that position.
        """
        if not self.kind and position < len(text):
            char = text[position]
            self.kind = {'"': "string", "{": "nested", "[": "nested"}.get(char, "scalar")
        if self.kind == "scalar":
            found = SCALAR_END.search(text, position)
            return (found.start(), "end") if found else (len(text), "more")
        end = len(text)
        while position < end:
            if self.quoted:
                position = self._in_string(text, position)
            else:
                found = STRUCTURE.search(text, position)
                if found is None:
                    break
                char, position = found[0], found.end()
                if char == '"':
                    self.quoted = True
                    continue
                if char in "{[":
                    self.depth += 1
                elif char in "}]":
                    self.depth -= 1
                else:
                    return position - 1, "broken"
            if not (self.quoted or self.depth):
                return position, "end"
        return end, "more"

    def _in_string(self, text: str, position: int) -> int:
        """Read to the end of the string or of the text."""
        found = IN_STRING.match(text, position + self.escaped)
        assert found is not None
        position, self.escaped = found.end(), False
        if position == len(text):
            return position
        self.quoted = text[position] != '"'
        self.escaped = self.quoted  # then the text ends with a backslash
        return position + 1
