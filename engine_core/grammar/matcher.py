"""Where one answer is in its grammar, and in its budget of thinking. Every call is followed by the
question whether it went wrong: llguidance never raises, it remembers.

A `MatcherTemplate` is a compiled grammar before its first token; each request gets a copy. Copies
share what was learnt about the vocabulary, so only the first of them is slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import TYPE_CHECKING

from engine_core.grammar.thinking_budget import MarkerSpelling, ThinkingBudgetTracker
from protocol.grammar import ThinkingBudget

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_MESSAGE = 300
WRONG_TOKEN = "doesn't satisfy the grammar"
"""What llguidance says of a token that its mask had left out."""


class Matcher:
    """One answer's place in its grammar. Moved by the engine alone, one token at a time.

    inner  None: free text
    gauge  None: thinking as long as the model likes
    """

    def __init__(self, inner: LLMatcher | None, gauge: ThinkingBudgetTracker | None = None) -> None:
        self._inner = inner
        self._gauge = gauge

    @property
    def error(self) -> str | None:
        """What went wrong (a limit was reached, or a token was not possible); it stays so."""
        return explain(self._inner) if self._inner and self._inner.is_error() else None

    @property
    def was_misled(self) -> bool:
        """It was given a token that it does not admit. Any other error is the grammar's own."""
        return WRONG_TOKEN in (self.error or "")

    @property
    def is_complete(self) -> bool:
        """Nothing can follow."""
        inner = self._inner
        return inner is not None and inner.is_stopped() and not inner.is_error()

    @property
    def constrains(self) -> bool:
        """The next token needs a mask."""
        return self._inner is not None or self.forced is not None

    @property
    def forced(self) -> int | None:
        """The only token that the budget leaves. Where the grammar does not admit it yet, a
        character or the like must be completed first, and the grammar goes before."""
        return self._gauge.forced if self._gauge else None

    @property
    def is_free(self) -> bool:
        """No grammar stands beside the budget."""
        return self._inner is None

    def consume(self, token: int) -> None:
        """The answer goes on with `token`; look at `error` afterwards."""
        if self._gauge is not None:
            self._gauge.consume(token)
        if self._inner is not None:
            self._inner.consume_token(token)

    def forced_run(self, most: int) -> list[int]:
        """How the answer goes on as far as nothing else is possible, in the tokens that are usual
        for such a text. Others may spell it, too, so they are no more than good guesses."""
        if self.forced is not None:
            return [self.forced]
        return self._inner.compute_ff_tokens()[:most] if self._inner is not None else []

    def admitted(self, drafts: Sequence[int]) -> list[int]:
        """As many of them, from the first on, as may follow, and do not complete the answer:
        nothing is sampled behind that."""
        walker, kept = self._copy(), []
        for draft in drafts:
            if not walker._admits(draft):
                break
            walker.consume(draft)
            if walker.is_complete or walker.error is not None:
                break
            kept.append(draft)
        return kept

    def along(self, drafts: Sequence[int]) -> Iterator[Matcher]:
        """The places behind each of them, as if they were consumed."""
        walker = self
        for draft in drafts:
            walker = walker._copy()
            walker.consume(draft)
            yield walker

    def look(self) -> None:
        """See what is possible now, for the sake of `error`: it may have been a copy that came
        here first."""
        if self._inner is not None and not self._inner.is_error():
            self._inner.compute_bitmask()

    def _admits(self, token: int) -> bool:
        inner, forced = self._inner, self.forced
        if inner is None:
            return forced is None or token == forced
        if forced is not None and inner.validate_tokens([forced]):
            return token == forced
        return inner.validate_tokens([token]) == 1

    def _copy(self) -> Matcher:
        inner = self._inner.deep_copy() if self._inner is not None else None
        return Matcher(inner, copy(self._gauge))

    def fill(self, address: int, num_bytes: int) -> None:
        """Write which tokens the grammar admits now, a bit each, at `address`. Look at `error`
        then."""
        if self._inner is not None:
            self._inner.unsafe_compute_mask_ptr(address, num_bytes)


class MatcherTemplate:
    """inner     None: free text
    budget    None: no limit to thinking; else with how to spell it
    """

    def __init__(
        self, inner: LLMatcher | None, budget: tuple[ThinkingBudget, MarkerSpelling] | None = None
    ) -> None:
        self._inner = inner
        self._budget = budget

    def start(self) -> Matcher:
        inner = self._inner.deep_copy() if self._inner is not None else None
        return Matcher(inner, ThinkingBudgetTracker(*self._budget) if self._budget else None)


def explain(inner: LLMatcher) -> str:
    """llguidance's message without the traces, quotations and advice that follow it."""
    message = inner.get_error().partition("<backtrace>")[0].partition("<non-verbose/>")[0]
    if message.startswith("panic"):
        return "the grammar is too large"
    lines = list(filter(None, map(str.strip, message.splitlines())))
    reasons = [line for line in lines[1:] if line.startswith("error:")]  # of a regular expression
    return " ".join(_cut(line) for line in [*lines[:1], *reasons[:1]]) or "unknown error"


def _cut(line: str) -> str:
    return line if len(line) <= MAX_MESSAGE else line[:MAX_MESSAGE] + "..."
