"""Who gets drafts, and how many: guesses at the next tokens, verified by a step that is due anyway.

Drafts never change an answer (protocol/steps.py: what is sampled is what plain decoding samples),
only its speed. A step takes the time of its weights and of its tokens: one of `width` tokens about
twice that of one token. So, with B rows in a step, a draft costs 1 / width of the time that is
fixed, and saves, if it is right, its row's share of a whole step, (1 + B / width) / B: it pays
where its chance exceeds B / (B + width). Chances are counted per request: of the drafts that were
looked at, the share that was right, p; that the i-th of a run is right, p ** i.

What a request's drafts depend on must be known when its step is planned. So while drafts are out,
or a request that does well with them could get some, no step is planned ahead of the result.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from math import log
from typing import Protocol

from engine_core.ngram import NgramDrafter
from engine_core.request import Phase, Request
from protocol.config import EngineConfig

PRIOR = 0.5
"""The chance of a draft of which nothing is known, as if one had been seen."""
FORGET = 0.9
"""What was seen weighs so much less after each step that brings drafts, and ..."""
FORGET_IDLE = 0.98
"""... after each that brings none: a request that did badly is tried again, in the end."""
LEAST_CHANCE = 0.2
"""To plan ahead is worth something too: drafts that are less likely do not pay."""


class Drafter(Protocol):
    """Guesses how one request goes on. A model that drafts stands behind the same call, fed by what
    the worker told with the last step."""

    def propose(self, tokens: array[int], most: int) -> list[int]:
        """Up to `most` >= 1 tokens that may follow all known `tokens`, the likeliest run."""
        ...


@dataclass(slots=True)
class Guesses:
    """How one request does with drafts: `right` of `seen`, as far as they are remembered.

    awaited    what is thought of the token that is on its way, where a step has waited for it
    """

    drafter: Drafter
    right: float = 0.0
    seen: float = 0.0
    awaited: int | None = None

    @property
    def chance(self) -> float:
        return (self.right + PRIOR) / (self.seen + 1)

    def learn(self, proposed: int, accepted: int, token: int) -> None:
        """Of `proposed` drafts the first `accepted` were right. The one behind them was wrong; of
        those behind that one nobody knows. `token` came first: to have waited for it in vain is as
        bad as a wrong draft."""
        if not proposed and self.awaited is not None:
            proposed, accepted = 1, int(token == self.awaited)
        self.awaited = None
        forget = FORGET if proposed else FORGET_IDLE
        self.right = self.right * forget + accepted
        self.seen = self.seen * forget + min(accepted + 1, proposed)


class Speculation:
    """The policy of one engine, from its configuration."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def start(self, request: Request) -> None:
        """A request is accepted. What a grammar constrains gets no drafts."""
        if self._config.speculation == "ngram" and request.samples and request.grammar is None:
            drafter = NgramDrafter(self._config.ngram_min, self._config.ngram_max)
            request.guesses = Guesses(drafter)

    def propose(self, request: Request, most: int, rows: int) -> list[int]:
        """Drafts for a request all of whose tokens are known, in a step of so many rows."""
        guesses = request.guesses
        if guesses is None:
            return []
        count = min(most, self._worth(guesses, rows))
        return guesses.drafter.propose(request.tokens, count) if count > 0 else []

    def awaits(self, running: Iterable[Request], rows: int) -> bool:
        """Whether to plan ahead would keep one of these from drafts that are likely to be right."""
        return any(self._is_likely(request, rows) for request in running)

    def _is_likely(self, request: Request, rows: int) -> bool:
        guesses = request.guesses
        if guesses is None or request.phase is not Phase.RUNNING or not request.num_pending:
            return False
        if not self._worth(guesses, rows):
            return False
        guess = guesses.drafter.propose(request.tokens, 1)
        guesses.awaited = guess[0] if guess else None
        return bool(guess)

    def _worth(self, guesses: Guesses, rows: int) -> int:
        """How many drafts in a row are likely enough to pay."""
        least = max(LEAST_CHANCE, rows / (rows + self._config.draft_width))
        chance = guesses.chance
        if chance < least:
            return 0
        if chance >= 1:
            return self._config.max_drafts
        return min(self._config.max_drafts, int(log(least) / log(chance)))
