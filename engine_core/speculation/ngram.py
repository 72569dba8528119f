"""N-gram drafter (prompt lookup): proposes what followed the last occurrence of the current n-gram.

Each request has an index over its own tokens, prompt and answer. For each run of `shortest` tokens
it stores the last position where the run ended, and for each position the previous one with the
same run. A run is indexed when a token follows it, so each token is indexed once. A lookup compares
at most MAX_CANDIDATES positions, up to `longest` tokens back: the longest match wins, and among
equal ones the latest.
"""

from __future__ import annotations

from array import array

MAX_CANDIDATES = 8
CATCH_UP = 4096
"""Tokens indexed per call: the index of a long prompt is built over several steps."""


class NgramDrafter:
    """The n-gram index of one request (a `Drafter`). The tokens passed to it only grow."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._last: dict[bytes, int] = {}  # run -> position after its last occurrence
        self._before = array("i", [0] * shortest)  # position -> previous one of the same run

    @property
    def num_indexed(self) -> int:
        """The number of leading positions in the index."""
        return len(self._before)

    def index_first(self, tokens: array[int], num_indexed: int) -> None:
        """Index this many leading positions of `tokens`."""
        while self.num_indexed < min(num_indexed, len(tokens)):
            self._catch_up(tokens[:num_indexed])

    def propose(self, tokens: array[int], max_tokens: int) -> list[int]:
        """Return up to `max_tokens` drafts.

        If the match reaches the end of the known tokens, the draft continues with itself.
        """
        self._catch_up(tokens)
        position = self._match(tokens)
        if not position:
            return []
        drafts = tokens[position : position + max_tokens].tolist()
        period = len(tokens) - position
        while len(drafts) < max_tokens:
            drafts.append(drafts[len(drafts) - period])
        return drafts

    def _catch_up(self, tokens: array[int]) -> None:
        start = len(self._before)
        for position in range(start, min(len(tokens), start + CATCH_UP)):
            run = tokens[position - self._shortest : position].tobytes()
            self._before.append(self._last.get(run, 0))
            self._last[run] = position

    def _match(self, tokens: array[int]) -> int:
        """Return the position with the longest match before it, or 0.

        It is 0 if there is no match, or if indexing has not caught up.
        """
        known = len(tokens)
        if len(self._before) < known or known <= self._shortest:
            return 0
        position = self._last.get(tokens[known - self._shortest :].tobytes(), 0)
        best, best_length = 0, 0
        for _ in range(MAX_CANDIDATES):
            if not position or best_length >= self._longest:
                break
            length = self._match_length(tokens, position)
            if length > best_length:
                best, best_length = position, length
            position = self._before[position]
        return best

    def _match_length(self, tokens: array[int], position: int) -> int:
        """Return how many tokens before `position` equal the last tokens, up to `longest`."""
        known = len(tokens)
        for length in range(self._shortest, min(self._longest, position)):
            if tokens[position - 1 - length] != tokens[known - 1 - length]:
                return length
        return min(self._longest, position)
