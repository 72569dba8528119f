"""The markers of a format in one model's vocabulary.

A marker can arrive in three ways:

- If the vocabulary has it as one token, it arrives as a `MarkerToken` and is recognised by its id
  alone. The same letters spelt by other tokens are text.
- If it is several ordinary tokens, `markers.Scanner` finds it in the text.
- A special token that occurs in such a spelt-out marker arrives as a `MarkerPart`. It has text
  inside a marker and none outside.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

import msgspec

from gateway.text.markers import MarkerSet


class MarkerToken(msgspec.Struct, frozen=True, gc=False):
    """A marker of the active format that is one token."""

    token_id: int
    text: str


class MarkerPart(msgspec.Struct, frozen=True, gc=False):
    """A special token that occurs in spelt-out markers. It has no text anywhere else."""

    text: str


Piece = str | MarkerToken | MarkerPart


class Lexicon:
    """The markers of a format that are tokens of one vocabulary. Shared, as it only caches.

    tokens  token id -> marker
    parts   token id -> text, for special tokens that occur in markers which are not tokens
    pieces  token id -> the parser's input for it, for both
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

    def is_token(self, marker: str) -> bool:
        return marker in self._by_id

    def automaton(self, markers: tuple[str, ...]) -> MarkerSet | None:
        """Return a matcher for the spelt-out ones of `markers`, or None if there are none."""
        if markers not in self._sets:
            spelt = [marker for marker in markers if marker not in self._by_id]
            self._sets[markers] = MarkerSet(spelt) if spelt else None
        return self._sets[markers]


# ---- markers with a suffix

SUFFIXED = re.compile(r"<(?:tool_calls?|think)(:[^\s<>]+)>")
"""A marker with a suffix that only the checkpoint's vocabulary has: `<tool_call:6124c78e>`."""


def marker_suffix(vocabulary: Iterable[str]) -> str:
    """Return the suffix of a vocabulary's markers with its colon, or "" if they have none."""
    return next((found[1] for token in vocabulary if (found := SUFFIXED.fullmatch(token))), "")


def suffixed_markers(text: str) -> list[str]:
    """Return the markers with a suffix in a text, such as a chat template."""
    return [found[0] for found in SUFFIXED.finditer(text)]


def with_suffix(marker: str, vocabulary: Collection[str]) -> str:
    """Return `marker`, which ends with ">", as a checkpoint with this vocabulary writes it.

    Most markers of such a checkpoint have the suffix. A marker that the vocabulary has only
    without the suffix is written without it.
    """
    longer = marker.removesuffix(">") + marker_suffix(vocabulary) + ">"
    return marker if marker in vocabulary and longer not in vocabulary else longer
