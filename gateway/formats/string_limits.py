"""Strings within a schema's limits, as regular expressions in a format's spelling.

The schema's `pattern` (ECMA's syntax) is read character by character and rewritten, so that it
admits no character that the format could not read back. Parts that are not regular (look-around,
references, word boundaries) are refused, and so are limits that would have to hold together with
it.
"""

from __future__ import annotations

import re

from gateway.formats.schema_cases import Limits
from gateway.formats.string_escapes import ALL, Ranges, StringEscapes, merged, signs, without

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
"""`format` -> a pattern that admits only such strings, if not all of them."""


def limited(spelling: StringEscapes, limits: Limits) -> str:
    """Return a pattern for strings within the limits. Raise ValueError naming the keyword that
    prevents it.
    """
    named = [key for key in ("pattern", "format") if key in limits]
    length = [key for key in ("minLength", "maxLength") if key in limits]
    if len(named) > 1 or (named and length):
        raise ValueError(f"{named[0]!r} cannot be enforced together with {(named + length)[1]!r}")
    if not named:
        least, most = limits.get("minLength", 0), limits.get("maxLength")
        if most is not None and most < least:
            raise ValueError("'maxLength' is less than 'minLength'")
        return spelling.of_length(least, most)
    pattern = limits[named[0]] if named[0] == "pattern" else FORMATS.get(limits["format"])
    if pattern is None:
        raise ValueError(f"the format {limits['format']!r} cannot be enforced")
    return Translator(pattern, spelling).translated()


class Translator:
    """Translates one pattern.

    Anchors are supported at the ends of the pattern's own options. Without them an option may stand
    anywhere in the string.
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

    def _peek(self, text: str) -> bool:
        if not self._pattern.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _options(self, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise self._fault("is nested too deeply")
        options = [self._option(depth)]
        while self._peek("|"):
            options.append(self._option(depth))
        return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"

    def _option(self, depth: int) -> str:
        anything = f"{self._spelling.any()}*"
        start = self._peek("^")
        parts, end = [], False
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            if end:
                raise self._fault("goes on behind its end")
            if self._peek("$"):
                end = True
            else:
                parts.append(self._piece(depth))
        if depth and (start or end):
            raise self._fault("has an anchor inside of a group")
        if depth:
            return "".join(parts)
        return ("" if start else anything) + "".join(parts) + ("" if end else anything)

    def _piece(self, depth: int) -> str:
        return self._atom(depth) + self._times()

    def _times(self) -> str:
        times = next((sign for sign in "*+?" if self._peek(sign)), "")
        if not times and (found := TIMES.match(self._pattern, self._at)):
            self._at = found.end()
            times = found[0]
        if times:
            self._peek("?")  # as few as possible: the same strings
        return times

    def _atom(self, depth: int) -> str:
        sign = self._pattern[self._at]
        self._at += 1
        match sign:
            case "(":
                return self._group(depth)
            case "[":
                return self._spelling.signs(self._set())
            case ".":
                return self._spelling.signs(without(ALL, LINE_ENDS))
            case "\\":
                return self._spelling.signs(self._escape())
            case "^" | "*" | "+" | "?":
                raise self._fault(f"has a {sign!r} where it means nothing")
        return self._spelling.signs(signs(sign))

    def _group(self, depth: int) -> str:
        if self._peek("?") and not self._peek(":"):
            named = re.compile(r"P?<[A-Za-z_]\w*>").match(self._pattern, self._at)
            if named is None:
                raise self._fault("looks around, or has flags")
            self._at = named.end()
        inner = self._options(depth + 1)
        if not self._peek(")"):
            raise self._fault("has an unmatched parenthesis")
        return f"(?:{inner})"

    def _set(self) -> Ranges:
        negated = self._peek("^")
        found: list[tuple[int, int]] = []
        while not self._peek("]"):
            first = self._member()
            if not self._pattern.startswith("-]", self._at) and self._peek("-"):
                last = self._member()
                if len(first) != 1 or len(last) != 1 or first[0][0] > last[0][0]:
                    raise self._fault("has a range without order")
                first = ((first[0][0], last[0][0]),)
            found += first
        ranges = merged(found)
        return without(ALL, ranges) if negated else ranges

    def _member(self) -> Ranges:
        if self._at >= len(self._pattern):
            raise self._fault("has an unmatched bracket")
        sign = self._pattern[self._at]
        self._at += 1
        return self._escape(inside=True) if sign == "\\" else signs(sign)

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
        return signs(sign)

    def _numbered(self, length: int) -> Ranges:
        digits = self._pattern[self._at : self._at + length]
        if len(digits) != length or not all(d in "0123456789abcdefABCDEF" for d in digits):
            raise self._fault("has a sign's number that is none")
        self._at += length
        return signs(chr(int(digits, 16)))
