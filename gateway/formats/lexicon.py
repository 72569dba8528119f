"""The markers of a format in one model's vocabulary.

Generated tokens reach a parser as pieces of three types:

- `MarkerToken`: a marker that the vocabulary has as one token. It is recognised by its id alone;
  the same letters spelt by other tokens are text.
- `str`: text. `markers.Scanner` finds in it the markers that consist of several ordinary
  tokens.
- `MarkerPart`: a special token that is a part of such a spelt-out marker. It counts as text inside
  a marker, and has no text elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any

import msgspec

from gateway.text.markers import MarkerSet


class MarkerToken(msgspec.Struct, frozen=True, gc=False):
    """A marker of the format that is one token of the vocabulary."""

    token_id: int
    text: str


class MarkerPart(msgspec.Struct, frozen=True, gc=False):
    """A special token that is a part of spelt-out markers. It has no text anywhere else."""

    text: str


Piece = str | MarkerToken | MarkerPart


class Lexicon:
    """The tokens of one vocabulary that matter to a format.

    All parsers share it. Only its caches change.

    tokens  token id -> marker
    parts   token id -> text, for special tokens that are parts of spelt-out markers
    pieces  token id -> the `MarkerToken` or `MarkerPart` that the parser receives for it
    """

    def __init__(
        self, tokens: Mapping[int, str] | None = None, parts: Mapping[int, str] | None = None
    ) -> None:
        self.tokens = dict(tokens or {})
        self.parts = dict(parts or {})
        self.pieces: dict[int, Piece] = {
            **{token: MarkerPart(text) for token, text in self.parts.items()},
            **{token: MarkerToken(token, marker) for token, marker in self.tokens.items()},
        }
        self._by_id = frozenset(self.tokens.values())
        self._sets: dict[tuple[str, ...], MarkerSet | None] = {}
        self.tables: dict[Hashable, dict[str, dict[str, Callable[[Any, str], None]]]] = {}
        """Parser -> state -> marker -> handler: a cache of `FormatParser`."""
        self.automata: dict[Hashable, dict[str, MarkerSet | None]] = {}
        """Parser -> state -> automaton of its markers: a cache of `FormatParser`."""
        self._extended: dict[tuple[int, str], Lexicon] = {}

    def is_token(self, marker: str) -> bool:
        return marker in self._by_id

    def has_special(self, marker: str) -> bool:
        """Return whether `marker` is one token, or contains a special token."""
        return any(part in marker for part in (*self._by_id, *self.parts.values()))

    def automaton(self, markers: tuple[str, ...]) -> MarkerSet | None:
        """Return a matcher that searches text for those of `markers` that are not single tokens.
        Return None if all of them are single tokens."""
        if markers not in self._sets:
            spelt = [marker for marker in markers if marker not in self._by_id]
            self._sets[markers] = MarkerSet(spelt) if spelt else None
        return self._sets[markers]

    def with_token(self, token_id: int, marker: str) -> Lexicon:
        """Return a lexicon in which `marker` is a token, too. It is cached, and has its own
        caches."""
        added = token_id, marker
        if added not in self._extended:
            self._extended[added] = Lexicon({**self.tokens, token_id: marker}, self.parts)
        return self._extended[added]


# ---- markers with a suffix

SUFFIXED = re.compile(r"<(?:tool_calls?|think)(:[^\s<>]+)>")
"""A marker with a suffix, such as `<tool_call:6124c78e>`. Each checkpoint has a suffix of its own.
"""


def marker_suffix(vocabulary: Iterable[str]) -> str:
    """Return the suffix of the markers in a vocabulary, with its colon, or "" if they have none."""
    return next((found[1] for token in vocabulary if (found := SUFFIXED.fullmatch(token))), "")


def suffixed_markers(text: str) -> list[str]:
    """Return the markers with a suffix that occur in a text such as a chat template."""
    return [found[0] for found in SUFFIXED.finditer(text)]


def with_suffix(marker: str, vocabulary: Collection[str]) -> str:
    """Return `marker`, which ends with ">", with the suffix that this vocabulary's markers have. A
    marker that the vocabulary has only without the suffix is returned unchanged."""
    longer = marker.removesuffix(">") + marker_suffix(vocabulary) + ">"
    return marker if marker in vocabulary and longer not in vocabulary else longer
