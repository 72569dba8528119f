"""Where one answer is in its grammar. Every call is followed by the question whether it went wrong:
llguidance never raises, it remembers.

A `Template` is a compiled grammar before its first token; each request gets a copy. Copies share
what was learnt about the vocabulary, so only the first of them is slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_MESSAGE = 300


class Matcher:
    """One answer's place in its grammar. Moved by the engine alone, one token at a time."""

    def __init__(self, inner: LLMatcher) -> None:
        self._inner = inner

    @property
    def error(self) -> str | None:
        """What went wrong (a limit was reached, or a token was not possible); it stays so."""
        return explain(self._inner) if self._inner.is_error() else None

    @property
    def is_complete(self) -> bool:
        """Nothing can follow."""
        return self._inner.is_stopped() and not self._inner.is_error()

    def consume(self, token: int) -> None:
        """The answer goes on with `token`; look at `error` afterwards."""
        self._inner.consume_token(token)

    def fill(self, address: int, num_bytes: int) -> None:
        """Write which tokens are possible now, a bit each, at `address`. Look at `error` then."""
        self._inner.unsafe_compute_mask_ptr(address, num_bytes)


class Template:
    def __init__(self, inner: LLMatcher) -> None:
        self._inner = inner

    def start(self) -> Matcher:
        return Matcher(self._inner.deep_copy())


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
