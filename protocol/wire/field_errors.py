"""The errors of msgspec in plain words: "must be a whole number or null, not a string"."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
"""msgspec's name of a type -> what a value of it must be."""
_GIVEN = {**_WANTED, "int": "a number", "float": "a number with decimals", "bool": "a boolean"}
"""msgspec's name of a type -> what a value of it is."""
_UNITS = {"str": "character", "array": "item", "object": "member"}
_LIMITS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_PLACE = re.compile(r" - at (?:`key` in )?`[^`]*`\Z")


def in_words(message: str) -> str:
    """Return a message of msgspec in words, without the place that it may end with. A message of
    another shape is returned unchanged."""
    text = _PLACE.sub("", message)
    for pattern, write in _SHAPES.items():
        if found := pattern.fullmatch(text):
            return write(found)
    return text


def with_field(message: str) -> str:
    """Return a message of msgspec in words, after the field at its end: "top_k: must be ..."."""
    field = message.partition(" - at `$.")[2].rstrip("`")
    return f"{field}: {in_words(message)}" if field else in_words(message)


def _types(text: str, names: Mapping[str, str]) -> str:
    """Return the types of `int | null` in words."""
    words = [names.get(name, name) for name in text.split(" | ")]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _mismatch(found: re.Match[str]) -> str:
    return f"must be {_types(found[1], _WANTED)}, not {_types(found[2], _GIVEN)}"


def _bound(found: re.Match[str]) -> str:
    kind, sign, number = found.groups()
    joint = ", " if "=" in sign else " "
    return f"must be {_types(kind, _WANTED)}{joint}{_LIMITS[sign]} {_number(number)}"


def _size(found: re.Match[str]) -> str:
    kind, sign, number = found.groups()
    limit = f"{_LIMITS[sign]} " if sign else ""
    return f"must have {limit}{_number(number)} {_UNITS[kind]}{'s' * (number != '1')}"


def _number(text: str) -> str:
    """Return a number without a needless fraction, and with commas."""
    value = float(text) if "." in text or "e" in text else int(text)
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


_SHAPES: Mapping[re.Pattern[str], Callable[[re.Match[str]], str]] = {
    re.compile(r"Expected `([^`]+)`, got `([^`]+)`"): _mismatch,
    re.compile(r"Expected `(int|float)` ([<>]=?) (\S+)"): _bound,
    re.compile(r"Expected `(str|array|object)` of length (?:([<>]=?) )?(\d+)(?:, got \d+)?"): _size,
    re.compile(r"Expected `\w+` that's a multiple of (\S+)"): (
        lambda found: f"must be a multiple of {_number(found[1])}"
    ),
    re.compile(r"Expected `str` matching regex (.+)", re.DOTALL): (
        lambda found: f"must match the pattern {found[1]}"
    ),
    re.compile(r"Object missing required field `([^`]*)`"): (
        lambda found: f"the field {found[1]!r} is required"
    ),
    re.compile(r"Object contains unknown field `([^`]*)`"): (
        lambda found: f"unknown field {found[1]!r}"
    ),
    re.compile(r"Invalid (?:enum )?value (.+)", re.DOTALL): (
        lambda found: f"{found[1]} is not an allowed value"
    ),
    re.compile(r"(?:Number|Integer value) out of range"): (
        lambda found: "the number is out of range"
    ),
}
"""Shape of a message -> function that writes it in words."""
