"""Matcher: the state of one answer in its grammar and in its thinking budget.

If llguidance fails, it stores an error instead of raising it. Callers therefore check `error` after
each call.

A `MatcherTemplate` is a compiled grammar before its first token. Each request starts with a copy of
it. Copies share the data that llguidance has computed about the vocabulary, so only the first use
of a grammar is slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import TYPE_CHECKING

from engine_core.grammar.thinking_budget import MarkerSpelling, ThinkingBudgetTracker
from protocol.engine.grammar import ThinkingBudget

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_MESSAGE = 300
WRONG_TOKEN = "doesn't satisfy the grammar"
"""Part of llguidance's message about a token that its mask excludes."""


class Matcher:
    """The state of one answer. The engine advances it by each committed token.

    - inner: llguidance's state; None if there is no grammar
    - budget_tracker: state of the thinking budget; None if thinking is not limited
    """

    def __init__(
        self, inner: LLMatcher | None, budget_tracker: ThinkingBudgetTracker | None = None
    ) -> None:
        self._inner = inner
        self._budget_tracker = budget_tracker

    @property
    def error(self) -> str | None:
        """llguidance's error message, or None. An error means that a limit was reached, or that a
        consumed token was not admitted. It is never cleared."""
        return explain(self._inner) if self._inner and self._inner.is_error() else None

    @property
    def was_given_wrong_token(self) -> bool:
        """Whether `error` is about a consumed token that the grammar does not admit. The cause of
        any other error is the grammar itself."""
        return WRONG_TOKEN in (self.error or "")

    @property
    def is_complete(self) -> bool:
        """Whether the grammar admits no further token, because the answer is complete. False if
        there is no grammar."""
        inner = self._inner
        return inner is not None and inner.is_stopped() and not inner.is_error()

    @property
    def constrains(self) -> bool:
        """Whether the next token needs a mask."""
        return self._inner is not None or self.forced is not None

    @property
    def forced(self) -> int | None:
        """The only token that the thinking budget allows next; None if it allows all tokens. If the
        grammar does not admit this token, the grammar takes precedence."""
        return self._budget_tracker.forced if self._budget_tracker else None

    @property
    def is_free(self) -> bool:
        """Whether the answer has no grammar. It may have a thinking budget."""
        return self._inner is None

    def consume(self, token: int) -> None:
        """Advance by `token`. Check `error` afterwards."""
        if self._budget_tracker is not None:
            self._budget_tracker.consume(token)
        if self._inner is not None:
            self._inner.consume_token(token)

    def forced_tokens(self, max_tokens: int) -> list[int]:
        """Return drafts: up to `max_tokens` tokens that spell the only text that may come next.

        Return [] if several texts may come next, and one token if the thinking budget forces it.
        The model may split the text into other tokens, so the drafts must still be verified.
        """
        if self.forced is not None:
            return [self.forced]
        return self._inner.compute_ff_tokens()[:max_tokens] if self._inner is not None else []

    def admitted_prefix(self, drafts: Sequence[int]) -> list[int]:
        """Return the longest prefix of `drafts` that the matcher admits. The prefix ends before a
        token that would complete the answer, because nothing is sampled after such a token."""
        walker, kept = self._copy(), []
        for draft in drafts:
            if not walker._admits(draft):
                break
            walker.consume(draft)
            if walker.is_complete or walker.error is not None:
                break
            kept.append(draft)
        return kept

    def walk(self, drafts: Sequence[int]) -> Iterator[Matcher]:
        """Yield the matcher after each draft, without changing this one."""
        walker = self
        for draft in drafts:
            walker = walker._copy()
            walker.consume(draft)
            yield walker

    def update_error(self) -> None:
        """Compute the next mask, so that `error` is set if the mask cannot be computed.

        The step's mask may have been computed by a copy of this matcher (`walk`). Then only the
        copy has the error.
        """
        if self._inner is not None and not self._inner.is_error():
            self._inner.compute_bitmask()

    def _admits(self, token: int) -> bool:
        """Return whether `token` may follow, by the grammar and the budget."""
        inner, forced = self._inner, self.forced
        if inner is None:
            return forced is None or token == forced
        if forced is not None and inner.validate_tokens([forced]):
            return token == forced
        return inner.validate_tokens([token]) == 1

    def _copy(self) -> Matcher:
        inner = self._inner.deep_copy() if self._inner is not None else None
        return Matcher(inner, copy(self._budget_tracker))

    def write_mask(self, address: int, num_bytes: int) -> None:
        """Write the bit mask of the tokens that the grammar admits to `address`. Without a grammar,
        nothing is written. Check `error` afterwards."""
        if self._inner is not None:
            self._inner.unsafe_compute_mask_ptr(address, num_bytes)


class MatcherTemplate:
    """A compiled grammar before its first token.

    - inner: llguidance's state; None if there is no grammar
    - budget: the thinking budget and the spelling of its markers; None if thinking is not limited
    """

    def __init__(
        self, inner: LLMatcher | None, budget: tuple[ThinkingBudget, MarkerSpelling] | None = None
    ) -> None:
        self._inner = inner
        self._budget = budget

    def start(self) -> Matcher:
        """Return a matcher for a new answer."""
        inner = self._inner.deep_copy() if self._inner is not None else None
        return Matcher(inner, ThinkingBudgetTracker(*self._budget) if self._budget else None)


def explain(inner: LLMatcher) -> str:
    """Return llguidance's error message, without backtraces, quoted source and advice."""
    message = inner.get_error().partition("<backtrace>")[0].partition("<non-verbose/>")[0]
    if message.startswith("panic"):
        return "the grammar is too large"
    lines = list(filter(None, map(str.strip, message.splitlines())))
    reasons = [line for line in lines[1:] if line.startswith("error:")]  # of a regular expression
    return " ".join(_cut(line) for line in [*lines[:1], *reasons[:1]]) or "unknown error"


def _cut(line: str) -> str:
    return line if len(line) <= MAX_MESSAGE else line[:MAX_MESSAGE] + "..."
