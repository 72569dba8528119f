"""Words of llguidance's Lark dialect: texts, markers, stretches of free text.

All that a client or a format wrote as plain text becomes a regular expression in which every sign
is escaped by its number, so no text can be read as syntax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llguidance import regex_to_lark

from engine_core.grammar.markers import Markers, divider

ANY_TEXT = "(?s:.*)"
"""Any text, which never includes a marker."""
EMPTY = '""'

Speller = Callable[[str], str]


def speller(markers: Markers) -> Speller:
    """Writes a text as a sequence of Lark items: markers by their ids, the rest as literals."""
    divide = divider(markers)

    def spell(text: str) -> str:
        parts = enumerate(divide(text))
        items = (f"<[{markers[part]}]>" if n % 2 else literal(part) for n, part in parts)
        return " ".join(filter(None, items))

    return spell


def literal(text: str) -> str:
    """Exactly this text, as a Lark item; nothing for the empty text."""
    return f"/{''.join(map(_escaped, text))}/" if text else ""


def _escaped(sign: str) -> str:
    return sign if sign.isascii() and sign.isalnum() else f"\\x{{{ord(sign):x}}}"


def regex(pattern: str) -> str:
    """Text that `pattern` matches as a whole."""
    return f"/{regex_to_lark(pattern)}/"


def any_of(items: Iterable[str]) -> str:
    return " | ".join(items)


def up_to(rule: str, end: str, spell: Speller, pattern: str = ANY_TEXT) -> list[str]:
    """The lines of `rule`: text that `pattern` matches, then `end` at its first occurrence."""
    text = regex(pattern)
    first, _, others = spell(end).partition(" ")
    if first.startswith("<"):
        return [f"{rule}: {text} {first} {others}"]
    return [f"{rule}: {rule}-text {others}", f"{rule}-text[suffix={first}]: {text}"]
