"""Thinking budget: counts an answer's thinking tokens, and forces the closing marker at the limit.

The tracker converts the answer's tokens to bytes, in which each marker token has a unique spelling
(`MarkerSpelling`). So it finds the markers of a format whether they are single tokens, plain text,
or a mixture of both. Within the budget, and outside of thinking, any token is allowed. At the
limit, only the next token of the closing marker is allowed, until the marker is complete. If the
model has already written the beginning of the marker, the forced tokens continue it. If the text
ends within a UTF-8 character, the character is completed first.

The budget is not part of the grammar, because the answer may have no grammar. A grammar for it
would have to describe all free text around the thinking, with every special token and every end
that the request allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_core.grammar.markers import Markers, divider
from protocol.engine.grammar import ThinkingBudget

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MARK = b"\xff"
"""First byte of a marker's spelling. It never occurs in UTF-8 text."""
_MARK = re.compile(MARK + rb"\[(\d+)\]")
MAX_CHARACTER_BYTES = 4


@dataclass(frozen=True)
class MarkerSpelling:
    """Converts between a model's tokens and bytes, in which markers have unique spellings."""

    #: Return the bytes of a token. For a marker, they are `MARK` and its id in brackets, which no
    #: text contains.
    token_bytes: Callable[[int], bytes]
    #: Return the bytes of a text in which markers are spelled out.
    text_bytes: Callable[[str], bytes]
    #: Return tokens that have these bytes.
    tokens_from: Callable[[bytes], list[int]]


def spelling(tokenizer: LLTokenizer, markers: Markers) -> MarkerSpelling:
    """Return the spelling for a model's tokenizer and markers."""
    divide = divider(markers)
    by_id = {token: MARK + b"[%d]" % token for token in markers.values()}

    def text_bytes(text: str) -> bytes:
        parts = enumerate(divide(text))
        return b"".join(by_id[markers[part]] if n % 2 else part.encode() for n, part in parts)

    def tokens_from(text: bytes) -> list[int]:
        parts = enumerate(_MARK.split(text))
        split = ([int(part)] if n % 2 else tokenizer.tokenize_bytes(part) for n, part in parts)
        return [token for tokens in split for token in tokens]

    return MarkerSpelling(
        lambda token: by_id.get(token) or tokenizer.decode_bytes([token]), text_bytes, tokens_from
    )


class ThinkingBudgetTracker:
    """The state of one answer's thinking budget: the number of thinking tokens so far, and whether
    the answer is inside a thinking block.

    `forced` is the only token that may follow, or None if the budget allows any token.
    """

    __slots__ = (
        "_budget",
        "_closer",
        "_closers",
        "_inside",
        "_is_at_beginning",
        "_longest",
        "_openers",
        "_spelling",
        "_spent",
        "_tail",
        "forced",
    )

    def __init__(self, budget: ThinkingBudget, spelling: MarkerSpelling) -> None:
        self._budget = budget
        self._spelling = spelling
        self._openers = [spelling.text_bytes(text) for text in budget.opens]
        self._closers = [spelling.text_bytes(text) for text in budget.closes]
        self._longest = max(MAX_CHARACTER_BYTES, *map(len, self._openers + self._closers))
        self._inside = budget.inside
        self._closer = self._closers[0]
        #: Whether there were only blanks, or the beginning of an opening marker, since the start of
        #: the answer or the last thinking block.
        self._is_at_beginning = True
        #: The last bytes of the answer, in which a marker may have begun.
        self._tail = b""
        #: Number of thinking tokens so far.
        self._spent = 0
        self.forced: int | None = None
        self._update_forced()

    def consume(self, token: int) -> None:
        """Advance by `token`, and update `forced`."""
        self._tail += self._spelling.token_bytes(token)
        if self._inside:
            self._spent += 1
            self._find_end()
        if not self._inside:
            self._find_start()
        self._tail = self._tail[-self._longest :]
        self._update_forced()

    def _find_end(self) -> None:
        places = ((self._tail.find(closer), closer) for closer in self._closers)
        ends = [at + len(closer) for at, closer in places if at >= 0]
        if ends:
            self._spent -= 1  # the token that completes the marker does not count
            self._inside, self._is_at_beginning = False, True
            self._tail = self._tail[min(ends) :]

    def _find_start(self) -> None:
        for place, opener in enumerate(self._openers):
            at = self._tail.find(opener)
            if at >= 0 and (MARK in opener or self._is_at_start(at)):
                self._inside = True
                self._closer = self._closers[place if place < len(self._closers) else 0]
                self._tail = self._tail[at + len(opener) :]
                return
        written = self._tail.lstrip()
        self._is_at_beginning = self._is_at_beginning and any(
            opener.startswith(written) for opener in self._openers
        )

    def _is_at_start(self, at: int) -> bool:
        """Return whether only blanks precede `at` since the answer's start or the last block.

        A marker written as plain text opens a block only there. Elsewhere it may be text about
        markup, or part of a call's arguments.
        """
        return self._is_at_beginning and not self._tail[:at].strip()

    def _update_forced(self) -> None:
        over = self._spent - self._budget.most
        if not self._inside or over < 0 or (is_cut(self._tail) and over < MAX_CHARACTER_BYTES):
            self.forced = None
        else:
            rest = self._closer[_overlap(self._tail, self._closer) :]
            self.forced = self._spelling.tokens_from(rest)[0]


def is_cut(text: bytes) -> bool:
    """Return whether `text` ends in the middle of a UTF-8 character."""
    for back in range(1, min(len(text), MAX_CHARACTER_BYTES - 1) + 1):
        byte = text[-back]
        if byte < 0x80 or byte >= 0xF8:
            return False
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False


def _overlap(tail: bytes, closer: bytes) -> int:
    """Return the length of the longest proper prefix of `closer` that `tail` ends with."""
    sizes = range(min(len(tail), len(closer) - 1), 0, -1)
    return next((size for size in sizes if tail.endswith(closer[:size])), 0)
