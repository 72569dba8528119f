"""N-gram drafter (prompt lookup): proposes the tokens that followed an earlier occurrence of the
request's last n-gram.

Each request has an index over its own tokens, prompt and answer. The index stores two things:

- for each n-gram of `shortest` tokens, the position after its last occurrence;
- for each position, the previous position after the same n-gram.

An n-gram is indexed when the token after it is known, so each position is indexed once. A lookup
compares the tokens before at most MAX_CANDIDATES earlier positions with the end of the sequence, at
most `longest` tokens each. The longest match wins; of equally long ones, the latest.
"""

from __future__ import annotations

from array import array

MAX_CANDIDATES = 8
CATCH_UP = 4096
"""Maximum number of tokens indexed per call, so a long prompt is indexed over several steps."""


class NgramDrafter:
    """A `Drafter` for one request, with an index over the request's tokens."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        #: N-gram -> position after its last occurrence.
        self._last: dict[bytes, int] = {}
        #: Position -> previous position after the same n-gram; 0: none.
        self._previous = array("i", [0] * shortest)

    @property
    def num_indexed(self) -> int:
        """The number of leading positions in the index."""
        return len(self._previous)

    def index_first(self, tokens: array[int], num_indexed: int) -> None:
        """Index the first `num_indexed` positions of `tokens`."""
        while self.num_indexed < min(num_indexed, len(tokens)):
            self._catch_up(tokens[:num_indexed])

    def propose(self, tokens: array[int], max_tokens: int) -> list[int]:
        """Return at most `max_tokens` drafts. If the copied tokens reach the end of `tokens`, the
        drafts repeat from their own start, because a repetition is expected to go on."""
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
        start = len(self._previous)
        for position in range(start, min(len(tokens), start + CATCH_UP)):
            ngram = tokens[position - self._shortest : position].tobytes()
            self._previous.append(self._last.get(ngram, 0))
            self._last[ngram] = position

    def _match(self, tokens: array[int]) -> int:
        """Return the position after the longest match with the end of `tokens`. Return 0 if there
        is no match, or if some tokens are not indexed yet."""
        known = len(tokens)
        if len(self._previous) < known or known <= self._shortest:
            return 0
        position = self._last.get(tokens[known - self._shortest :].tobytes(), 0)
        best, best_length = 0, 0
        for _ in range(MAX_CANDIDATES):
            if not position or best_length >= self._longest:
                break
            length = self._match_length(tokens, position)
            if length > best_length:
                best, best_length = position, length
            position = self._previous[position]
        return best

    def _match_length(self, tokens: array[int], position: int) -> int:
        """Return how many tokens before `position` equal the last tokens, at most `longest`. The
        caller has found that at least `shortest` tokens are equal."""
        known = len(tokens)
        for length in range(self._shortest, min(self._longest, position)):
            if tokens[position - 1 - length] != tokens[known - 1 - length]:
                return length
        return min(self._longest, position)
