"""How JSON itself spells strings, numbers and constants, and the whitespace between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from json.encoder import encode_basestring

string_json: Callable[[str], str] = encode_basestring
"""Return a text as a JSON string, with its quotes."""

SPACE = re.compile(r"[ \t\r\n]*+")
PLAIN = re.compile(r'[^"\\\x00-\x1f]*+')
"""Text inside a JSON string that is passed on unchanged."""

CONSTANTS = {
    "true": "true", "false": "false", "null": "null",
    "True": "true", "False": "false", "None": "null",
}  # fmt: skip
"""Word that is a value -> spelling of this value in JSON."""
BEGINS_CONSTANT = frozenset(word[:n] for word in CONSTANTS for n in range(1, len(word)))

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
    """Return a number in JSON's form, or None if `text` is not a number. If `whole`, return None
    for a number with a fraction or exponent, too.
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
    """Return a bare word as JSON: a constant, a number, or else a string."""
    constant = CONSTANTS.get(word) or json_number(word)
    return constant if constant is not None else string_json(word)
