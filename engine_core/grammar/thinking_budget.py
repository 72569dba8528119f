"""Thinking budget: counts an answer's thinking tokens, and forces the closing marker at the limit.

The tracker reads the answer's bytes, in which each marker token has a unique spelling
(`MarkerSpelling`). So a format's markers are found whether they are tokens, spelled out, or both
mixed. Within the budget, and after the thinking has ended, nothing is constrained. Beyond the
budget, each next token is the next one of the closing marker, from wherever the model has already
begun to write it. A character is never cut; it is completed first.

This state is separate from the grammar. A grammar would also have to describe the free text around
the thinking: every special token, and every end that the request allows. Counted here, the budget
covers all thinking blocks of an answer, and free text stays unconstrained.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_core.grammar.markers import Markers, divider
from protocol.grammar import ThinkingBudget

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MARK = b"\xff"
"""Starts a marker's bytes; it never occurs in text."""
_MARK = re.compile(MARK + rb"\[(\d+)\]")
MAX_CHARACTER_BYTES = 4


@dataclass(frozen=True)
class MarkerSpelling:
    """A model's tokens as bytes."""

    #: Bytes of one token. A marker is `MARK` and its id, so no text is mistaken for it.
    token_bytes: Callable[[int], bytes]
    #: Bytes of a text in which markers are spelled out.
    text_bytes: Callable[[str], bytes]
    #: Some tokens that have these bytes.
    tokens_from: Callable[[bytes], list[int]]


def spelling(tokenizer: LLTokenizer, markers: Markers) -> MarkerSpelling:
    divide = divider(markers)
    by_id = {token: MARK + b"[%d]" % token for token in markers.values()}

    def text_bytes(text: str) -> bytes:
        parts = enumerate(divide(text))
        return b"".join(by_id[markers[part]] if n % 2 else part.encode() for n, part in parts)

    def tokens_from(text: bytes) -> list[int]:
        parts = enumerate(_MARK.split(text))
        split = ([int(part)] if n % 2 else tokenizer.tokenize_bytes(part) for n, part in parts)
        return [token for some in split for token in some]

    return MarkerSpelling(
        lambda token: by_id.get(token) or tokenizer.decode_bytes([token]), text_bytes, tokens_from
    )


class ThinkingBudgetTracker:
    """The thinking budget of one answer.

    `forced` is the only token that may follow, or None if the budget does not restrict it.
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
        self._is_at_beginning = (
            True  # only blanks since the start, or since the last thinking block
        )
        self._tail = b""
        self._spent = 0
        self.forced: int | None = None
        self._update_forced()

    def consume(self, token: int) -> None:
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
            self._spent -= 1  # the marker itself does not count
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
        """Whether only blanks precede position `at`.

        A spelled-out marker opens a block only there. Later it may be text about markup, or part of
        a call's arguments.
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
    """Whether the text ends within a UTF-8 character."""
    for back in range(1, min(len(text), MAX_CHARACTER_BYTES - 1) + 1):
        byte = text[-back]
        if byte < 0x80 or byte >= 0xF8:
            return False
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False


def _overlap(tail: bytes, closer: bytes) -> int:
    """Return how many bytes of `closer` have been written already; fewer than all."""
    sizes = range(min(len(tail), len(closer) - 1), 0, -1)
    return next((size for size in sizes if tail.endswith(closer[:size])), 0)
