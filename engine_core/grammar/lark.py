"""Items of llguidance's Lark dialect: texts, markers, free text up to a marker.

Plain text from a client or a format becomes a regular expression in which every special character
is escaped by its code point, so no text can be read as syntax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llguidance import regex_to_lark

from engine_core.grammar.markers import Markers, divider

ANY_TEXT = "(?s:.*)"
"""Any text; it never includes a marker."""
EMPTY = '""'

Speller = Callable[[str], str]


def speller(markers: Markers) -> Speller:
    """Return a function that writes a text as Lark items: marker ids and literals."""
    divide = divider(markers)

    def spell(text: str) -> str:
        parts = enumerate(divide(text))
        items = (f"<[{markers[part]}]>" if n % 2 else literal(part) for n, part in parts)
        return " ".join(filter(None, items))

    return spell


def literal(text: str) -> str:
    """Return a Lark item that matches exactly this text; "" for the empty text."""
    return f"/{''.join(map(_escaped, text))}/" if text else ""


def _escaped(sign: str) -> str:
    return sign if sign.isascii() and sign.isalnum() else f"\\x{{{ord(sign):x}}}"


def regex(pattern: str) -> str:
    """Return a Lark item for text that `pattern` matches as a whole."""
    return f"/{regex_to_lark(pattern)}/"


def any_of(items: Iterable[str]) -> str:
    return " | ".join(items)


def up_to(rule: str, end: str, spell: Speller, pattern: str = ANY_TEXT) -> list[str]:
    """Return the lines of `rule`: text matching `pattern`, then the first occurrence of `end`."""
    text = regex(pattern)
    first, _, others = spell(end).partition(" ")
    if first.startswith("<"):
        return [f"{rule}: {text} {first} {others}"]
    return [f"{rule}: {rule}-text {others}", f"{rule}-text[suffix={first}]: {text}"]
