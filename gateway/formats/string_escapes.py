"""The spelling of a string's characters, as regular expressions (Rust's syntax).

A `StringEscapes` lists the characters that stand for themselves, those that are escaped, and those
that cannot be written. From it come patterns for strings of a length (here), and for strings that a
schema's `pattern` matches (`string_limits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

Ranges = Sequence[tuple[int, int]]
"""Code points, both ends included; sorted and disjoint."""

LAST = 0x10FFFF
ALL: Ranges = ((0, LAST),)
CONTROLS: Ranges = ((0, 0x1F),)


class StringEscapes(msgspec.Struct, frozen=True):
    """The spelling of a string's characters.

    never     characters that cannot be written
    escapes   character -> its escape; every other character stands for itself
    numbered  a pattern for a character that is written by its number, wherever any may be
    """

    never: Ranges = ()
    escapes: Mapping[str, str] = {}
    numbered: str = ""

    def signs(self, ranges: Ranges) -> str:
        """Return a pattern for one of these characters; it matches nothing if none can be
        written.
        """
        escaped = [sign for sign in self.escapes if holds(ranges, ord(sign))]
        special = merged([*self.never, *((ord(s), ord(s)) for s in self.escapes)])
        plain = without(ranges, special)
        options = [_class(plain)] if plain else []
        options += [exactly(self.escapes[sign]) for sign in escaped]
        if not options:
            return r"[^\x{0}-\x{10FFFF}]"
        return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"

    def any(self, but: str = "") -> str:
        """Return a pattern for one character, but not for one of these if it stands for itself."""
        one = self.signs(without(ALL, signs(but)))
        return f"(?:{one}|{self.numbered})" if self.numbered else one

    def text(self, text: str) -> str | None:
        """Return `text` as it is written, or None if it cannot be."""
        if any(holds(self.never, ord(sign)) and sign not in self.escapes for sign in text):
            return None
        return "".join(self.escapes.get(sign, sign) for sign in text)

    def of_length(self, least: int, most: int | None) -> str:
        return f"{self.any()}{{{least},{'' if most is None else most}}}"


def holds(ranges: Ranges, code: int) -> bool:
    return any(first <= code <= last for first, last in ranges)


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """Return `ranges` less `others`; both are merged."""
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


def signs(text: str) -> Ranges:
    return merged((ord(sign), ord(sign)) for sign in text)


def _class(ranges: Ranges) -> str:
    """Return a character class, written as its complement if that is shorter."""
    if ranges[0][0] == 0 and ranges[-1][1] == LAST:
        rest = without(ALL, ranges)
        return f"[^{_spans(rest)}]" if rest else "(?s:.)"
    return f"[{_spans(ranges)}]"


def _spans(ranges: Ranges) -> str:
    return "".join(_code(a) if a == b else f"{_code(a)}-{_code(b)}" for a, b in ranges)


def exactly(text: str) -> str:
    """Return a pattern for this text."""
    return "".join(_code(ord(sign)) for sign in text)


def _code(code: int) -> str:
    sign = chr(code)
    return sign if sign.isascii() and sign.isalnum() else f"\\x{{{code:X}}}"


def free_of(words: Sequence[str], spelling: StringEscapes) -> str:
    """Return a pattern for strings, in this spelling, in which none of `words` occurs.

    All words start with the same character, and count up to its next occurrence in them. After that
    character a word is in progress: `again` leads to the same character, `back` to text, `end` to
    the end.
    """
    head = words[0][0]
    assert all(word[0] == head for word in words), "they begin with different signs"
    tails = [word[1:].partition(head)[0] for word in words]
    text = f"{spelling.any(but=head)}*"
    again, back, end = _again(tails, head), _back(tails, head, spelling), _end(tails)
    first = exactly(head)
    return f"{text}(?:{first}(?:{again})*(?:{back}){text})*(?:{first}(?:{again})*(?:{end}))?"


def _next(tails: Sequence[str]) -> dict[str, list[str]]:
    """Return character -> the words' tails that may follow it, for characters that do not
    complete a word.
    """
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
