"""Values that JSON's grammar admits, but JSON readers cannot hold: numbers that are too large for a
double (`1e400`), and strings with half of a surrogate pair (`"\\ud83d"`)."""

from __future__ import annotations

from math import isinf

import msgspec

MAX_NUMBER_CHARS = 1024
"""A longer number counts as too large, because a reader need not remember more of it."""


def is_too_large(number: str) -> bool:
    """Return whether JSON readers cannot hold a JSON number: it is longer than MAX_NUMBER_CHARS, or
    it has a fraction or exponent and is infinite as a double."""
    if len(number) > MAX_NUMBER_CHARS:
        return True
    return not number.lstrip("-").isdigit() and isinf(float(number))


class ReadableCheck(msgspec.Struct):
    """Finds values that JSON readers cannot hold. A scanner of JSON passes it the parts of numbers
    and strings in order, in any pieces."""

    #: What the last such value has, or "".
    problem: str = ""
    #: The current number so far. It is at most MAX_NUMBER_CHARS + 1 characters long.
    number: str = ""
    #: Whether the last character is the first half of a surrogate pair.
    is_half: bool = False

    def number_part(self, text: str) -> None:
        """Read a piece of a number."""
        self.number += text[: MAX_NUMBER_CHARS + 1 - len(self.number)]

    def end_value(self) -> None:
        """Read the end of a number, if there is one."""
        if self.number and is_too_large(self.number):
            self.problem = "a number that is too large"
        self.number = ""

    def escaped_code(self, code: int) -> None:
        """Read an escape with the code of a character, or of half of a surrogate pair."""
        if self.is_half and 0xDC00 <= code < 0xE000:
            self.is_half = False
            return
        self.characters()
        if 0xDC00 <= code < 0xE000:
            self._found_half()
        self.is_half = 0xD800 <= code < 0xDC00

    def characters(self) -> None:
        """Read anything else in a string, or its end."""
        if self.is_half:
            self._found_half()
            self.is_half = False

    def _found_half(self) -> None:
        self.problem = "half of a surrogate pair, which is not a character"
