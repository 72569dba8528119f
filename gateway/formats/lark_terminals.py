"""Regular expressions of the terminals of a grammar in Lark, in the syntax that ECMAScript, Python
and Rust share."""

from __future__ import annotations

import re

from gateway.formats.string_limits import (
    ALL,
    Ranges,
    StringEscapes,
    Translator,
    char_ranges,
    merged,
    without,
)

COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
    "C_COMMENT": r"/\*(?:[^*]|\*+[^*/])*\*+/",
}
"""Terminals of `common` -> their regular expressions."""
COMMON["SIGNED_FLOAT"] = f"[+-]?{COMMON['FLOAT']}"
COMMON["NUMBER"] = f"(?:{COMMON['FLOAT']}|{COMMON['INT']})"
COMMON["SIGNED_NUMBER"] = f"[+-]?{COMMON['NUMBER']}"

_PLAIN = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_ <>=!@#%&~`'\",;:")
"""Characters that stand for themselves in a pattern, in and outside of a class."""
_SPECIAL = set(r"\^$.|?*+()[]{}-/")
ASCII: Ranges = ((0, 0x7F),)


class NotConvertible(ValueError):
    """Raised if a grammar is invalid, or has a part that no regular expression can express."""


class PlainSpelling(StringEscapes, frozen=True):
    """The spelling in which every character stands for itself, as patterns of JSON Schemas have
    it."""

    def one_of(self, ranges: Ranges) -> str:
        if not ranges:
            raise NotConvertible("a class of characters is empty")
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            return _char(ranges[0][0])
        if ranges[0][0] == 0 and ranges[-1][1] == ALL[0][1]:
            rest = without(ALL, ranges)
            return f"[^{_spans(rest)}]" if rest else r"[\s\S]"
        return f"[{_spans(ranges)}]"


def _spans(ranges: Ranges) -> str:
    return "".join(_char(a) if a == b else f"{_char(a)}-{_char(b)}" for a, b in ranges)


def _char(code: int) -> str:
    sign = chr(code)
    if sign in _PLAIN or code > 0x9F:
        return sign
    return f"\\{sign}" if sign in _SPECIAL else f"\\u{code:04x}"


class _Terminal(Translator):
    """Translates a regular expression of Python into one of the same texts, or of fewer, that means
    the same in Python, ECMAScript and Rust.

    Python's `\\w`, `\\d` and `\\s` contain letters, digits and blanks of all scripts. Here they are
    those of ASCII, and no negated class contains other ones.
    """

    def __init__(self, pattern: str, flags: str) -> None:
        super().__init__(pattern, PlainSpelling())
        if unknown := set(flags) - set("imsu"):
            raise self._fault(f"has the flag {min(unknown)!r}, which is not supported")
        self._ignores_case = "i" in flags
        self._dot = ALL if "s" in flags else without(ALL, char_ranges("\n"))

    def translated(self) -> str:
        text = self._options(1)
        if self._at < len(self._pattern):
            raise self._fault("has an unmatched parenthesis")
        return text

    def _atom(self, depth: int) -> str:
        sign = self._pattern[self._at]
        if sign == "(":
            self._at += 1
            return self._group(depth)
        if sign in "^$":
            raise self._fault(f"has {sign!r}, which is not supported")
        if sign == "{":  # in Python it may count, and may stand for itself
            raise self._fault(r"has a misplaced '{'; write \{ for the character")
        return self._spelling.one_of(self._cased(self._one()))

    def _one(self) -> Ranges:
        sign = self._pattern[self._at]
        self._at += 1
        match sign:
            case "[":
                return self._set()
            case ".":
                return self._dot
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                raise self._fault(f"has a misplaced {sign!r}")
        return char_ranges(sign)

    def _set(self) -> Ranges:
        start = self._at
        negated = self._pattern.startswith("^", start)
        first = start + negated
        if self._pattern.startswith("]", first):  # a bracket at the start stands for itself
            self._pattern = f"{self._pattern[:first]}\\{self._pattern[first:]}"
        found = super()._set()
        has_class = re.search(r"\\[dwsDWS]", self._pattern[start : self._at])
        return _within(found, ASCII) if negated and has_class else found

    def _escape(self, *, inside: bool = False) -> Ranges:
        sign = self._pattern[self._at : self._at + 1]
        if sign == "0" and self._pattern[self._at + 1 : self._at + 2].isdigit():
            raise self._fault("has an octal number, which is not supported")
        found = super()._escape(inside=inside)
        if sign in ("s", "S"):
            blanks = char_ranges("\t\n\v\f\r ")
            return blanks if sign == "s" else without(ASCII, blanks)
        return _within(found, ASCII) if sign in ("D", "W") else found

    def _numbered(self, length: int) -> Ranges:
        found = super()._numbered(length)
        if not has_char(found[0][0]):
            raise self._fault("has half of a surrogate pair")
        return found

    def _cased(self, ranges: Ranges) -> Ranges:
        """Return the characters and, if the case is ignored, the same ASCII letters in the other
        case."""
        if not self._ignores_case:
            return ranges
        letters = [(c, c) for c in (*range(0x41, 0x5B), *range(0x61, 0x7B)) if _has(ranges, c)]
        return merged([*ranges, *((c ^ 0x20, c ^ 0x20) for c, _ in letters)])


def has_char(code: int) -> bool:
    """Return whether a text can have a character with this number."""
    return code <= ALL[-1][1] and not 0xD800 <= code <= 0xDFFF


def _within(ranges: Ranges, others: Ranges) -> Ranges:
    return without(ranges, without(ALL, others))


def _has(ranges: Ranges, code: int) -> bool:
    return any(first <= code <= last for first, last in ranges)


def terminal_pattern(pattern: str, flags: str = "", at: str = "") -> str:
    try:
        return _Terminal(pattern, flags).translated()
    except NotConvertible:
        raise
    except ValueError as fault:
        raise NotConvertible(f"{at}{fault}") from None
