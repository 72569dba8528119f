"""What a request keeps to be drafted for: its drafter, and how many of its drafts were right.

speculation/draft_policy.py decides which requests get drafts, and how many.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol

PRIOR = 0.5
"""Acceptance rate before any draft was checked. It has the weight of one checked draft."""
DECAY = 0.9
"""Factor on past counts at each step with drafts."""
IDLE_DECAY = 0.98
"""Factor on past counts at each step without drafts.

The acceptance rate then returns to the prior, so a request with wrong drafts is tried again later.
"""
FORCED_PRIOR = 0.95
"""The prior for drafts forced by a grammar: the usual tokens of the only text that it allows."""


class Drafter(Protocol):
    """Proposes the next tokens of one request."""

    def propose(self, tokens: array[int], max_tokens: int) -> list[int]:
        """Return at most `max_tokens` (>= 1) tokens that are likely to follow `tokens`."""
        ...


class ModelDrafter:
    """The drafter of a request that uses the draft model: returns the drafts that the draft model
    proposed in the last step, unless more tokens are known by now."""

    def __init__(self) -> None:
        self._num_known = -1
        self._proposed: list[int] = []

    def on_proposed(self, num_known: int, proposed: list[int]) -> None:
        """Store the drafts that follow the first `num_known` tokens."""
        self._num_known, self._proposed = num_known, proposed

    def propose(self, tokens: array[int], max_tokens: int) -> list[int]:
        return self._proposed[:max_tokens] if len(tokens) == self._num_known else []


@dataclass(slots=True)
class AcceptanceTally:
    """Decayed counts of checked and accepted drafts: older drafts count less."""

    #: The acceptance rate before any draft was checked.
    prior: float
    #: Factor on the counts at each step without drafts.
    idle: float = IDLE_DECAY
    accepted: float = 0.0
    checked: float = 0.0

    @property
    def acceptance(self) -> float:
        return (self.accepted + self.prior) / (self.checked + 1)

    def observe(self, proposed: int, accepted: int) -> None:
        """Count `proposed` drafts, of which the first `accepted` were right. If there are more, the
        next one was wrong, and the remaining ones were not checked."""
        decay = DECAY if proposed else self.idle
        self.accepted = self.accepted * decay + accepted
        self.checked = self.checked * decay + min(accepted + 1, proposed)


@dataclass(slots=True)
class RequestDrafting:
    """The drafter of one request, and the acceptance of the request's drafts."""

    drafter: Drafter
    #: Tally of the drafter's drafts for this request.
    tally: AcceptanceTally = field(default_factory=lambda: AcceptanceTally(PRIOR))
    #: Tally of the draft model over all requests; None for other drafters.
    shared_tally: AcceptanceTally | None = None
    #: Tally of the drafts that the request's grammar forced.
    forced_tally: AcceptanceTally = field(default_factory=lambda: AcceptanceTally(FORCED_PRIOR))
    #: The drafter's guess of the token in flight, if the next step waits for this token.
    awaited_guess: int | None = None
    #: Whether the drafts in flight are forced by the grammar.
    is_forced: bool = False

    def on_proposed(self, num_known: int, proposed: list[int]) -> None:
        """Store the tokens that the draft model proposes after the first `num_known` tokens."""
        assert isinstance(self.drafter, ModelDrafter), "there is no draft model"
        self.drafter.on_proposed(num_known, proposed)

    def observe(self, proposed: int, accepted: int, token: int) -> None:
        """Count the drafts of a step: `proposed` drafts, of which the first `accepted` were right.
        Drafts that the grammar forced are counted in `forced_tally`, others in `tally`.

        Call this after every step that sampled a token for the request, even without drafts,
        because past counts then decay.

        `token` is the first token that the step sampled. If `proposed` is 0 and the next step
        waited for this token, the drafter's guess of it counts as a draft, so that useless waiting
        lowers the acceptance rate.
        """
        counts = (proposed, accepted)
        if not proposed and self.awaited_guess is not None:
            counts = (1, int(token == self.awaited_guess))
        self.tally.observe(*((0, 0) if self.is_forced else counts))
        if self.shared_tally is not None and not self.is_forced and counts[0]:
            self.shared_tally.observe(*counts)
        self.forced_tally.observe(*(counts if self.is_forced else (0, 0)))
        self.awaited_guess, self.is_forced = None, False
