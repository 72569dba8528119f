"""How much an answer may think: a gauge that counts, and says what to write once it is enough.

A gauge reads the answer's bytes, in which each token that is a marker stands for itself
(`MarkerSpelling`), so a format's markers are found whether they are tokens, spelt out, or both
mixed. While the model thinks within its budget, and from the end of the thinking on, nothing is
constrained. Beyond it each next token is the next one of the closing marker, as far as the model
has not begun to write it by itself. A character is never cut: it is completed first.

That is state beside the grammar and no part of it, because a grammar would have to describe the
free text around the thinking, too: every special token, every end the request allows. Counted here,
the budget holds for all blocks of an answer together, and free text stays as free as without it.
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
"""Begins a marker's bytes; no text has it."""
_MARK = re.compile(MARK + rb"\[(\d+)\]")
MAX_CHARACTER_BYTES = 4


@dataclass(frozen=True)
class MarkerSpelling:
    """A model's tokens as bytes.

    of_token   one token's; a marker's are no text (`MARK`, then its id), so no text is taken for it
    of_text    of a text in which markers are written as letters
    tokens     some tokens that have these bytes
    """

    of_token: Callable[[int], bytes]
    of_text: Callable[[str], bytes]
    tokens: Callable[[bytes], list[int]]


def spelling(tokenizer: LLTokenizer, markers: Markers) -> MarkerSpelling:
    divide = divider(markers)
    by_id = {token: MARK + b"[%d]" % token for token in markers.values()}

    def of_text(text: str) -> bytes:
        parts = enumerate(divide(text))
        return b"".join(by_id[markers[part]] if n % 2 else part.encode() for n, part in parts)

    def tokens(text: bytes) -> list[int]:
        parts = enumerate(_MARK.split(text))
        split = ([int(part)] if n % 2 else tokenizer.tokenize_bytes(part) for n, part in parts)
        return [token for some in split for token in some]

    return MarkerSpelling(
        lambda token: by_id.get(token) or tokenizer.decode_bytes([token]), of_text, tokens
    )


class ThinkingBudgetTracker:
    """Of one answer. `forced` is the only possible next token; None: the budget says nothing."""

    __slots__ = (
        "_begins",
        "_budget",
        "_closer",
        "_closers",
        "_inside",
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
        self._openers = [spelling.of_text(text) for text in budget.opens]
        self._closers = [spelling.of_text(text) for text in budget.closes]
        self._longest = max(MAX_CHARACTER_BYTES, *map(len, self._openers + self._closers))
        self._inside = budget.inside
        self._closer = self._closers[0]
        self._begins = True  # nothing but blanks was said since the start, or since the thinking
        self._tail = b""
        self._spent = 0
        self.forced: int | None = None
        self._limit()

    def consume(self, token: int) -> None:
        self._tail += self._spelling.of_token(token)
        if self._inside:
            self._spent += 1
            self._look_for_end()
        if not self._inside:
            self._look_for_start()
        self._tail = self._tail[-self._longest :]
        self._limit()

    def _look_for_end(self) -> None:
        places = ((self._tail.find(closer), closer) for closer in self._closers)
        ends = [at + len(closer) for at, closer in places if at >= 0]
        if ends:
            self._spent -= 1  # it was the marker
            self._inside, self._begins = False, True
            self._tail = self._tail[min(ends) :]

    def _look_for_start(self) -> None:
        for place, opener in enumerate(self._openers):
            at = self._tail.find(opener)
            if at >= 0 and (MARK in opener or self._is_at_start(at)):
                self._inside = True
                self._closer = self._closers[place if place < len(self._closers) else 0]
                self._tail = self._tail[at + len(opener) :]
                return
        said = self._tail.lstrip()
        self._begins = self._begins and any(opener.startswith(said) for opener in self._openers)

    def _is_at_start(self, at: int) -> bool:
        """A marker that is spelt out opens a block only there: further on it may be text about
        markup, or stand in the arguments of a call."""
        return self._begins and not self._tail[:at].strip()

    def _limit(self) -> None:
        over = self._spent - self._budget.most
        if not self._inside or over < 0 or (is_cut(self._tail) and over < MAX_CHARACTER_BYTES):
            self.forced = None
        else:
            rest = self._closer[_overlap(self._tail, self._closer) :]
            self.forced = self._spelling.tokens(rest)[0]


def is_cut(text: bytes) -> bool:
    """Whether a character is left incomplete at the end."""
    for back in range(1, min(len(text), MAX_CHARACTER_BYTES - 1) + 1):
        byte = text[-back]
        if byte < 0x80 or byte >= 0xF8:
            return False
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False


def _overlap(tail: bytes, closer: bytes) -> int:
    """How much of `closer` has been written already: less than all of it."""
    sizes = range(min(len(tail), len(closer) - 1), 0, -1)
    return next((size for size in sizes if tail.endswith(closer[:size])), 0)
