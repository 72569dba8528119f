"""Strings between quotes or markers."""

from __future__ import annotations

import msgspec

from gateway.formats.schema_cases import Limits
from gateway.formats.string_escapes import StringEscapes, free_of, signs
from gateway.formats.string_limits import limited


class Quotes(msgspec.Struct, frozen=True):
    """Strings between two signs.

    avoid  words that may not occur in any string, as they would end what it stands in
    """

    quote: str
    spelling: StringEscapes
    avoid: tuple[str, ...] = ()

    def free(self) -> str:
        inner = free_of(self.avoid, self.spelling) if self.avoid else f"{self.spelling.any()}*"
        return self._between(inner)

    def limited(self, limits: Limits) -> str:
        """Raises ValueError naming what cannot be written."""
        return self._between(limited(self._careful, limits))

    def text(self, text: str) -> str | None:
        inner = self.spelling.text(text)
        if inner is None or any(word in inner for word in self.avoid):
            return None
        return self.quote + inner + self.quote

    def _between(self, inner: str) -> str:
        return self.quote + inner + self.quote

    @property
    def _careful(self) -> StringEscapes:
        """Without the sign that words to be avoided begin with."""
        never = signs("".join(word[0] for word in self.avoid))
        return msgspec.structs.replace(self.spelling, never=[*self.spelling.never, *never])


class Marked(msgspec.Struct, frozen=True):
    """Strings between two equal markers: they hold everything but the marker."""

    mark: str
