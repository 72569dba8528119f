"""How syntaxes spell literals, as data for the scanner: the dialects of JSON and of Python."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """How a syntax spells literals.

    `opens` and `closes` map the syntax's brackets to symbols, of which the scanner keeps a stack,
    one for each open bracket. A symbol decides what is written as JSON: `{` is an object, `[` an
    array, and `(` an object that the syntax writes between parentheses.
    """

    #: Opening bracket -> its symbol.
    opens: Mapping[str, str] = msgspec.field(default_factory=lambda: {"{": "{", "[": "["})
    #: Closing bracket -> the symbols that it closes.
    closes: Mapping[str, str] = msgspec.field(default_factory=lambda: {"}": "{", "]": "["})
    #: Characters that start a string.
    quotes: str = '"'
    #: Whether three quotes may start and end a string, as one quote does.
    tripled: bool = False
    #: Whether the caller reads the strings.
    outside_strings: bool = False
    #: Letter after a backslash -> JSON that the escape stands for, inside a string.
    escapes: Mapping[str, str] = {}
    #: Letter after a backslash that starts a character's code -> number of digits that follow.
    codes: Mapping[str, int] = {}
    #: Characters of a bare word. None: the only words are JSON's constants and numbers.
    word: re.Pattern[str] | None = None
    #: Characters of a bare word that is a key. None: those of any bare word.
    key: re.Pattern[str] | None = None
    #: Characters that may stand between a key and its value.
    colons: str = ":"
    #: Most characters of a word that are held back until the word ends. None: no limit.
    max_word_chars: int | None = None
    #: Words in lower case that may stand before a quote. In a string after a word with an `r`, a
    #: backslash is text.
    prefixes: frozenset[str] = frozenset()
    #: Whether strings that follow each other, possibly after blanks, are one string.
    adjacent: bool = False


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
    prefixes=frozenset({"r", "b", "f", "u", "rb", "br", "fr", "rf"}),
    adjacent=True,
)
"""Literals of Python."""
