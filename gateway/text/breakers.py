"""Finds the tokens of DRY's sequence breakers, which a request gives as texts.

A breaker can begin within a token and end within another one. So every token that contains the
whole text is a breaker. A token that ends with the first part of the text is the head of a breaker,
and the tokens of the rest are its tail. Tokens with the same tail are one `DryBreaker`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from protocol.engine.sampling import (
    MAX_BREAKER_HEADS,
    MAX_BREAKER_TAIL,
    MAX_BREAKERS,
    MAX_TAIL_TOKENS,
    DryBreaker,
)
from protocol.wire.errors import InvalidRequest

FIELD = "dry_sequence_breakers"
USUAL_BREAKERS = ("\n", ":", '"', "*")
"""The breakers of a request that uses DRY and gives none, as in llama.cpp."""
MAX_CACHED = 64
"""Most lists of breakers whose tokens are cached for each tokenizer, 0.6 MB or less each."""
Tail = tuple[int, ...]
_NOT_IN_TEXT = b"\xff"
"""A byte that no text in UTF-8 contains."""


class TokenIndex:
    """Finds tokens by a part of their bytes, without a pass over the vocabulary.

    tokens   the bytes of each token, in the order of their ids
    """

    def __init__(self, tokens: Iterable[bytes]) -> None:
        listed = [*tokens]
        self._joined = _NOT_IN_TEXT.join(listed)
        #: Where each token begins in `_joined`.
        self._starts = array("Q", accumulate((len(each) + 1 for each in listed), initial=0))
        # Tokens with the same ending are neighbours if they are sorted from their last byte.
        backwards = [each[::-1] for each in listed]
        self._ids = array("I", sorted(range(len(listed)), key=backwards.__getitem__))
        self._backwards = [backwards[token_id] for token_id in self._ids]

    def containing(self, text: bytes) -> Iterator[int]:
        """Yield the tokens that contain `text`, a part of a text in UTF-8, in ascending order."""
        at = self._joined.find(text)
        while at >= 0:
            after = bisect_right(self._starts, at)
            yield after - 1
            at = self._joined.find(text, self._starts[after])

    def ending_with(self, text: bytes) -> Sequence[int]:
        """Return the tokens that end with `text`, which is the beginning of a text in UTF-8."""
        key = text[::-1]
        beyond = key[:-1] + bytes([key[-1] + 1])
        return self._ids[bisect_left(self._backwards, key) : bisect_left(self._backwards, beyond)]


def find_breakers(
    texts: Sequence[str], index: TokenIndex, encode: Callable[[str], list[int]]
) -> list[DryBreaker]:
    """Return the breakers of texts that are not empty. Raise InvalidRequest, naming the field, if
    an engine would refuse their number.

    index    the tokens of the model
    encode   returns the token ids of a text that follows another one
    """
    heads: dict[Tail, set[int]] = {}
    for text in texts:
        for tail, ids in _parts(text, index, encode):
            heads.setdefault(tail, set()).update(ids)
        _check(heads)
    ordered = sorted(heads.items(), key=lambda entry: min(entry[1]))
    return [DryBreaker(sorted(ids), list(tail)) for tail, ids in ordered]


def _parts(
    text: str, index: TokenIndex, encode: Callable[[str], list[int]]
) -> Iterator[tuple[Tail, set[int]]]:
    """Yield the tails of a text, each with heads. The text is not divided within a character."""
    whole = set(index.containing(text.encode()))
    if whole:
        yield (), whole
    for size in range(1, len(text)):
        if ids := set(index.ending_with(text[:size].encode())) - whole:
            yield tuple(encode(text[size:])[:MAX_BREAKER_TAIL]), ids


def _check(heads: dict[Tail, set[int]]) -> None:
    """Raise InvalidRequest if these breakers exceed a limit of SamplingParams."""
    for count, limit, what in (
        (
            sum(map(len, heads.values())),
            MAX_BREAKER_HEADS,
            "tokens of this model contain one of the texts, or begin one",
        ),
        (len(heads), MAX_BREAKERS, "different sequences of tokens can end one of the texts"),
        (
            sum(map(len, heads)),
            MAX_TAIL_TOKENS,
            "tokens are in the sequences that can end one of the texts",
        ),
    ):
        if count > limit:
            raise InvalidRequest.at(FIELD, f"{count:,} {what}; the limit is {limit:,}")
