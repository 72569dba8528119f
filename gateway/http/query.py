"""Reads the parameters of a request's query. Errors name the parameter."""

from __future__ import annotations

from collections.abc import Sequence

from flask import request

from protocol.wire.errors import InvalidRequest
from protocol.wire.field_words import one_of

_MAX_DIGITS = 20


def whole_number(name: str, *, default: int, least: int, most: int) -> int:
    """Return the number in a parameter. Raises InvalidRequest if it is not one within the bounds.

    default   the result if the parameter is absent
    """
    text = request.args.get(name)
    if text is None:
        return default
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
    if not is_number or not least <= int(text) <= most:
        raise InvalidRequest.wrong(name, f"a whole number from {least:,} to {most:,}", text)
    return int(text)


def choice(name: str, choices: Sequence[str], *, default: str) -> str:
    """Return the word in a parameter. Raises InvalidRequest if it is not one of `choices`."""
    word = request.args.get(name, default)
    if word not in choices:
        raise InvalidRequest.wrong(name, one_of(choices), word)
    return word
