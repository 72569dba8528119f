"""Prompt lookup: what followed the last time the sequence ended as it does now.

Per request an index over its own tokens, prompt and answer: of each run of `shortest` tokens the
last place where it ended, and of each such place the one before it. A run is entered when a token
follows it, so each token costs one entry, once. Looking up costs at most MAX_CANDIDATES comparisons
of `longest` tokens: of the latest places, the one that most tokens lead up to wins, of equal ones
the latest.
"""

from __future__ import annotations

from array import array

MAX_CANDIDATES = 8
CATCH_UP = 4096
"""Tokens entered in one call: of a long prompt the index is built over several steps."""


class NgramDrafter:
    """The index of one request. It is shown the request's tokens with every call; they only grow.

    `propose` is a Drafter's (drafting.py).
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._last: dict[bytes, int] = {}  # run -> the place behind its last occurrence
        self._before = array("i", [0] * shortest)  # place -> the one before it, of the same run

    def propose(self, tokens: array[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow; where a match reaches to the end of what is known,
        the guess goes on with itself."""
        self._catch_up(tokens)
        place = self._match(tokens)
        if not place:
            return []
        guess = tokens[place : place + most].tolist()
        period = len(tokens) - place
        while len(guess) < most:
            guess.append(guess[len(guess) - period])
        return guess

    def _catch_up(self, tokens: array[int]) -> None:
        begin = len(self._before)
        for place in range(begin, min(len(tokens), begin + CATCH_UP)):
            run = tokens[place - self._shortest : place].tobytes()
            self._before.append(self._last.get(run, 0))
            self._last[run] = place

    def _match(self, tokens: array[int]) -> int:
        """The place whose past is most like the end of `tokens`; 0: none, or not caught up."""
        known = len(tokens)
        if len(self._before) < known or known <= self._shortest:
            return 0
        place = self._last.get(tokens[known - self._shortest :].tobytes(), 0)
        best, best_length = 0, 0
        for _ in range(MAX_CANDIDATES):
            if not place or best_length >= self._longest:
                break
            length = self._shared(tokens, place)
            if length > best_length:
                best, best_length = place, length
            place = self._before[place]
        return best

    def _shared(self, tokens: array[int], place: int) -> int:
        """How many tokens before `place` equal the last ones, as far as `longest`."""
        known = len(tokens)
        for length in range(self._shortest, min(self._longest, place)):
            if tokens[place - 1 - length] != tokens[known - 1 - length]:
                return length
        return min(self._longest, place)
