"""Patterns (regular expressions in Rust's syntax) of the strings that a schema's limits allow.

The strings are matched as a format spells them. A `StringEscapes` lists the characters that stand
for themselves, those that are escaped, and those that cannot be written.

A schema's `pattern` (in ECMA's syntax) is read character by character. It is rewritten so that it
admits no character that the format could not read back. Parts that are not regular (look-around,
back-references, word boundaries) are refused. Length limits beside a `pattern` or `format` are
refused, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import msgspec

from gateway.formats.schema_cases import Limits

Ranges = Sequence[tuple[int, int]]
"""Ranges of code points, both ends included; sorted and disjoint."""

LAST = 0x10FFFF
ALL: Ranges = ((0, LAST),)
CONTROLS: Ranges = ((0, 0x1F),)


class StringEscapes(msgspec.Struct, frozen=True):
    """How a format spells the characters of a string.

    never     characters that cannot be written, except those in `escapes`
    escapes   character -> its escape; every other character stands for itself
    numbered  pattern of an escape with a character's number, which is admitted wherever any
              character may occur; "" if there are no such escapes
    """

    never: Ranges = ()
    escapes: Mapping[str, str] = {}
    numbered: str = ""

    def one_of(self, ranges: Ranges) -> str:
        """Return a pattern that matches one character in `ranges`. It matches nothing if the format
        can write none of them."""
        escaped = [sign for sign in self.escapes if contains(ranges, ord(sign))]
        special = merged([*self.never, *((ord(s), ord(s)) for s in self.escapes)])
        plain = without(ranges, special)
        options = [_class(plain)] if plain else []
        options += [exactly(self.escapes[sign]) for sign in escaped]
        if not options:
            return r"[^\x{0}-\x{10FFFF}]"
        return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"

    def any(self, but: str = "") -> str:
        """Return a pattern that matches any one character that the format can write. The characters
        in `but` are matched only as numbered escapes, if the format has these."""
        one = self.one_of(without(ALL, char_ranges(but)))
        return f"(?:{one}|{self.numbered})" if self.numbered else one

    def text(self, text: str) -> str | None:
        """Return `text` as the format spells it, or None if the format cannot write it."""
        if any(contains(self.never, ord(sign)) and sign not in self.escapes for sign in text):
            return None
        return "".join(self.escapes.get(sign, sign) for sign in text)

    def with_length(self, least: int, most: int | None) -> str:
        """Return a pattern of strings with `least` to `most` characters. If `most` is None, there
        is no upper limit."""
        return f"{self.any()}{{{least},{'' if most is None else most}}}"


def contains(ranges: Ranges, code: int) -> bool:
    return any(first <= code <= last for first, last in ranges)


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the ranges sorted, with overlapping and adjacent ones joined."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """Return `ranges` without the code points of `others`. Each of the two lists must be sorted and
    have no overlaps."""
    found = []
    for first, last in ranges:
        for low, high in others:
            if low > last or high < first:
                continue
            if low > first:
                found.append((first, low - 1))
            first = high + 1
        if first <= last:
            found.append((first, last))
    return found


def char_ranges(text: str) -> Ranges:
    """Return the characters of `text` as ranges."""
    return merged((ord(sign), ord(sign)) for sign in text)


def _class(ranges: Ranges) -> str:
    """Return a character class. If it contains both the first and the last code point, it is
    written as the complement of the others."""
    if ranges[0][0] == 0 and ranges[-1][1] == LAST:
        rest = without(ALL, ranges)
        return f"[^{_spans(rest)}]" if rest else "(?s:.)"
    return f"[{_spans(ranges)}]"


def _spans(ranges: Ranges) -> str:
    return "".join(_code(a) if a == b else f"{_code(a)}-{_code(b)}" for a, b in ranges)


def exactly(text: str) -> str:
    """Return a pattern that matches this text only."""
    return "".join(_code(ord(sign)) for sign in text)


def _code(code: int) -> str:
    sign = chr(code)
    return sign if sign.isascii() and sign.isalnum() else f"\\x{{{code:X}}}"


def free_of(words: Sequence[str], spelling: StringEscapes) -> str:
    """Return a regular expression for the strings, in this spelling, that contain none of `words`.

    All words must start with the same character, the head, and another one must follow it. If the
    head occurs again in a word, the word is cut before it. The expression then rejects more strings
    than it must.

    After a head, the string may continue in three ways without completing a word: up to the next
    head (`again`), with other text (`back`), or to its end (`end`).
    """
    return _free_of(
        tuple(words), spelling.never, tuple(spelling.escapes.items()), spelling.numbered
    )


def with_any_of(words: Sequence[str]) -> str:
    """Return a regular expression for the texts that contain at least one of `words`."""
    return f"(?s:.*)(?:{'|'.join(map(exactly, words))})(?s:.*)"


@lru_cache(maxsize=256)
def _free_of(
    words: tuple[str, ...], never: Ranges, escapes: tuple[tuple[str, str], ...], numbered: str
) -> str:
    """Return the result of `free_of`. A format needs few such expressions, for many values of every
    request."""
    spelling = StringEscapes(never, dict(escapes), numbered)
    head = words[0][0]
    assert all(word[0] == head for word in words), "they begin with different signs"
    tails = [word[1:].partition(head)[0] for word in words]
    text = f"{spelling.any(but=head)}*"
    again, back, end = _again(tails, head), _back(tails, head, spelling), _end(tails)
    first = exactly(head)
    return f"{text}(?:{first}(?:{again})*(?:{back}){text})*(?:{first}(?:{again})*(?:{end}))?"


def _next(tails: Sequence[str]) -> dict[str, list[str]]:
    """Return a mapping: first character of a tail -> the tails that start with it, without it.
    A character that is a whole tail is left out."""
    found: dict[str, list[str]] = {}
    for tail in tails:
        found.setdefault(tail[0], []).append(tail[1:])
    return {sign: rest for sign, rest in found.items() if "" not in rest}


def _again(tails: Sequence[str], head: str) -> str:
    on = [f"{exactly(s)}(?:{_again(rest, head)})" for s, rest in _next(tails).items()]
    return "|".join([exactly(head), *on])


def _back(tails: Sequence[str], head: str, spelling: StringEscapes) -> str:
    others = head + "".join(tail[0] for tail in tails)
    on = [f"{exactly(s)}(?:{_back(rest, head, spelling)})" for s, rest in _next(tails).items()]
    return "|".join([spelling.any(but=others), *on])


def _end(tails: Sequence[str]) -> str:
    on = [f"{exactly(s)}(?:{_end(rest)})" for s, rest in _next(tails).items()]
    return "|".join(["", *on])


# ---- the limits of a schema

MAX_DEPTH = 50
DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = ((9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
                 (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000),
                 (0xFEFF, 0xFEFF))  # fmt: skip
LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
CLASSES = {"d": DIGIT, "w": WORD, "s": SPACE}
SIGNS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
TIMES = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")

_DATE = (
    r"\d{3}[1-9]-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|"
    r"(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_WORD = "[A-Za-z0-9_+-]{1,64}"
FORMATS = {
    "date": f"^(?:{_DATE})$",
    "time": f"^{_TIME}$",
    "date-time": f"^(?:{_DATE})T{_TIME}$",
    "uuid": "^[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}$",
    "ipv4": rf"^(?:{_OCTET}\.){{3}}{_OCTET}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL}){{0,3}}$",
    "email": rf"^{_WORD}(?:\.{_WORD}){{0,3}}@{_LABEL}(?:\.{_LABEL}){{1,3}}$",
    "uri": "^[A-Za-z][A-Za-z0-9+.-]{0,31}://[A-Za-z0-9._~:/?#@!$&*+,;=-]+$",
}
"""`format` -> a pattern that admits only strings of this format, though perhaps not all."""


def limited(spelling: StringEscapes, limits: Limits) -> str:
    """Return a pattern of the strings, in this spelling, that the keywords `limits` of a schema
    allow. Raise ValueError, naming the keyword, if one cannot be enforced."""
    named = [key for key in ("pattern", "format") if key in limits]
    length = [key for key in ("minLength", "maxLength") if key in limits]
    if len(named) > 1 or (named and length):
        raise ValueError(f"{named[0]!r} cannot be enforced together with {(named + length)[1]!r}")
    if not named:
        least, most = limits.get("minLength", 0), limits.get("maxLength")
        if most is not None and most < least:
            raise ValueError("'maxLength' is less than 'minLength'")
        return spelling.with_length(least, most)
    pattern = limits[named[0]] if named[0] == "pattern" else FORMATS.get(limits["format"])
    if pattern is None:
        raise ValueError(f"the format {limits['format']!r} cannot be enforced")
    return Translator(pattern, spelling).translated()


class Translator:
    """Translates one `pattern` of a schema.

    Anchors are supported only at the ends of the pattern's outermost alternatives. Without an
    anchor, other text may come before or after the match, as JSON Schema requires.
    """

    def __init__(self, pattern: str, spelling: StringEscapes) -> None:
        self._pattern = pattern
        self._spelling = spelling
        self._at = 0

    def translated(self) -> str:
        text = self._options(0)
        if self._at < len(self._pattern):
            raise self._fault("has an unmatched parenthesis")
        return text

    def _fault(self, what: str) -> ValueError:
        return ValueError(f"the pattern {self._pattern!r} {what}")

    def _accept(self, text: str) -> bool:
        """Skip `text` if the rest of the pattern starts with it. Return whether it does."""
        if not self._pattern.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _options(self, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise self._fault("is nested too deeply")
        options = [self._option(depth)]
        while self._accept("|"):
            options.append(self._option(depth))
        return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"

    def _option(self, depth: int) -> str:
        anything = f"{self._spelling.any()}*"
        start = self._accept("^")
        parts, end = [], False
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            if end:
                raise self._fault("continues after '$'")
            if self._accept("$"):
                end = True
            else:
                parts.append(self._piece(depth))
        if depth and (start or end):
            raise self._fault("has an anchor inside a group")
        if depth:
            return "".join(parts)
        return ("" if start else anything) + "".join(parts) + ("" if end else anything)

    def _piece(self, depth: int) -> str:
        return self._atom(depth) + self._times()

    def _times(self) -> str:
        times = next((sign for sign in "*+?" if self._accept(sign)), "")
        if not times and (found := TIMES.match(self._pattern, self._at)):
            self._at = found.end()
            times = found[0]
        if times:
            self._accept("?")  # a lazy repetition matches the same strings
        return times

    def _atom(self, depth: int) -> str:
        sign = self._pattern[self._at]
        self._at += 1
        match sign:
            case "(":
                return self._group(depth)
            case "[":
                return self._spelling.one_of(self._set())
            case ".":
                return self._spelling.one_of(without(ALL, LINE_ENDS))
            case "\\":
                return self._spelling.one_of(self._escape())
            case "^" | "*" | "+" | "?":
                raise self._fault(f"has a misplaced {sign!r}")
        return self._spelling.one_of(char_ranges(sign))

    def _group(self, depth: int) -> str:
        if self._accept("?") and not self._accept(":"):
            named = re.compile(r"P?<[A-Za-z_]\w*>").match(self._pattern, self._at)
            if named is None:
                raise self._fault("has a lookaround or flags, which are not supported")
            self._at = named.end()
        inner = self._options(depth + 1)
        if not self._accept(")"):
            raise self._fault("has an unmatched parenthesis")
        return f"(?:{inner})"

    def _set(self) -> Ranges:
        negated = self._accept("^")
        found: list[tuple[int, int]] = []
        while not self._accept("]"):
            first = self._member()
            if not self._pattern.startswith("-]", self._at) and self._accept("-"):
                last = self._member()
                if len(first) != 1 or len(last) != 1 or first[0][0] > last[0][0]:
                    raise self._fault("has a range in the wrong order")
                first = ((first[0][0], last[0][0]),)
            found += first
        ranges = merged(found)
        return without(ALL, ranges) if negated else ranges

    def _member(self) -> Ranges:
        if self._at >= len(self._pattern):
            raise self._fault("has an unmatched bracket")
        sign = self._pattern[self._at]
        self._at += 1
        return self._escape(inside=True) if sign == "\\" else char_ranges(sign)

    def _escape(self, *, inside: bool = False) -> Ranges:
        if self._at >= len(self._pattern):
            raise self._fault("ends with a backslash")
        sign = self._pattern[self._at]
        self._at += 1
        if sign in CLASSES:
            return CLASSES[sign]
        if sign.lower() in CLASSES:
            return without(ALL, CLASSES[sign.lower()])
        if sign in "xu":
            return self._numbered(2 if sign == "x" else 4)
        if sign in SIGNS:
            return ((SIGNS[sign], SIGNS[sign]),)
        if sign == "b" and inside:
            return ((8, 8),)
        if sign.isalnum():
            raise self._fault(f"has \\{sign}, which is not supported")
        return char_ranges(sign)

    def _numbered(self, length: int) -> Ranges:
        digits = self._pattern[self._at : self._at + length]
        if len(digits) != length or not all(d in "0123456789abcdefABCDEF" for d in digits):
            raise self._fault("has a malformed character code")
        self._at += length
        return char_ranges(chr(int(digits, 16)))
