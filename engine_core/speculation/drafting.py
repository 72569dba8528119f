"""Who gets drafts, and how many: guesses at the next tokens, verified by a step that is due anyway.

Drafts never change an answer (protocol/steps.py: what is sampled is what plain decoding samples),
only its speed. What a step costs by its tokens is measured where it is computed (step_costs.py):
the first few more cost next to nothing, later ones as much as their multiplications; how much more
it takes for having drafts at all is learned from steps (overhead.py). So as many drafts are made as
give most tokens for their cost: n drafts in each of B rows give 1 + p + ... + p ** n tokens a row
for the cost of B * (1 + n) tokens. A draft model's draft costs all rows together c steps on top.
Chances are counted per request: of the drafts that were looked at, the share that was right, p;
that the i-th of a run is right, p ** i.

A draft model has to follow a request to guess for it: to compute its prompt, too. So one that was
wrong for the last requests follows few of the next.

What a request's drafts depend on must be known when its step is planned. So while drafts are out,
or a request that does well with them could get some, no step is planned ahead of the result.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine_core.request import Request, RequestPhase
from engine_core.speculation.ngram import NgramDrafter
from engine_core.speculation.overhead import DraftOverhead
from engine_core.speculation.step_costs import StepCosts
from protocol.config.engine import EngineConfig

PRIOR = 0.5
"""The chance of a draft of which nothing is known, as if one had been seen."""
FORGET = 0.9
"""What was seen weighs so much less after each step that brings drafts, and ..."""
FORGET_IDLE = 0.98
"""... after each that brings none: a request that did badly is tried again, in the end."""
MODEL_PRIOR = 0.7
"""The same of a draft model's, which somebody has chosen for the purpose."""
MODEL_IDLE = 0.995
"""And it is tried again later: a guess of it costs more than one at the past."""
TRY_EVERY = 16
"""Of new requests, where a draft model did badly with those before: does it still?"""
FORCED_PRIOR = 0.95
"""The same of a token that spells a grammar's only text in the usual way."""
LEAST_CHANCE = 0.2
"""To plan ahead is worth something too: drafts that are less likely do not pay."""


class Drafter(Protocol):
    """Guesses how one request goes on."""

    def propose(self, tokens: array[int], most: int) -> list[int]:
        """Up to `most` >= 1 tokens that may follow all known `tokens`, the likeliest run."""
        ...


class ModelDrafter:
    """What the worker's draft model told with the last step; void when more is known."""

    def __init__(self) -> None:
        self._known = -1
        self._proposed: list[int] = []

    def hear(self, known: int, proposed: list[int]) -> None:
        """It guesses this behind so many tokens."""
        self._known, self._proposed = known, proposed

    def propose(self, tokens: array[int], most: int) -> list[int]:
        return self._proposed[:most] if len(tokens) == self._known else []


@dataclass(slots=True)
class AcceptanceTally:
    """Of one kind of drafts: `right` of `seen`, as far as they are remembered.

    prior   their chance while nothing is known
    idle    what was seen weighs so much less after a step that brings none
    """

    prior: float
    idle: float = FORGET_IDLE
    right: float = 0.0
    seen: float = 0.0

    @property
    def chance(self) -> float:
        return (self.right + self.prior) / (self.seen + 1)

    def learn(self, proposed: int, accepted: int) -> None:
        """Of `proposed` drafts the first `accepted` were right. The one behind them was wrong; of
        those behind that one nobody knows."""
        forget = FORGET if proposed else self.idle
        self.right = self.right * forget + accepted
        self.seen = self.seen * forget + min(accepted + 1, proposed)


@dataclass(slots=True)
class RequestDrafting:
    """How one request does with drafts: the drafter's, and those that its grammar forces.

    common     of all requests with such a drafter, where what it does with one tells of the next
    awaited    what is thought of the token that is on its way, where a step has waited for it
    is_forced  of the drafts that are out: they are the grammar's
    """

    drafter: Drafter
    common: AcceptanceTally | None = None
    guessed: AcceptanceTally = field(default_factory=lambda: AcceptanceTally(PRIOR))
    forced: AcceptanceTally = field(default_factory=lambda: AcceptanceTally(FORCED_PRIOR))
    awaited: int | None = None
    is_forced: bool = False

    def hear(self, known: int, proposed: list[int]) -> None:
        """What the draft model guesses behind `known` tokens."""
        assert isinstance(self.drafter, ModelDrafter), "there is no draft model"
        self.drafter.hear(known, proposed)

    def learn(self, proposed: int, accepted: int, token: int) -> None:
        """What became of the drafts that were out; `token` came first: to have waited for it in
        vain is as bad as a wrong draft."""
        right = (proposed, accepted)
        if not proposed and self.awaited is not None:
            right = (1, int(token == self.awaited))
        self.guessed.learn(*((0, 0) if self.is_forced else right))
        if self.common is not None and not self.is_forced and right[0]:
            self.common.learn(*right)
        self.forced.learn(*(right if self.is_forced else (0, 0)))
        self.awaited, self.is_forced = None, False


class Speculation:
    """The policy of one engine, from its configuration.

    draft_cost   of a draft model's token, in steps
    step_costs   (tokens, cost) of a step, as measured; empty: nobody has
    """

    def __init__(
        self,
        config: EngineConfig,
        draft_cost: float = 0.0,
        step_costs: Sequence[tuple[int, float]] = (),
    ) -> None:
        self._config = config
        self._draft_cost = draft_cost
        self._costs = StepCosts.of(config.draft_width, step_costs)
        self._stretch = DraftOverhead()
        self._of_model = AcceptanceTally(MODEL_PRIOR)
        self._num_guessed_for = 0

    def start(self, request: Request) -> None:
        """A request is accepted."""
        kind = self._config.speculation
        if kind == "none" or (kind == "model" and self._draft_cost >= 1):
            return  # one that costs a step a token can save none
        if not request.samples:
            request.follows = kind == "model"
        elif kind == "model":
            chance = self._expected()
            request.follows = self._worth(chance, 1, self._draft_cost) > 0
            request.guesses = RequestDrafting(
                ModelDrafter(), self._of_model, AcceptanceTally(chance, MODEL_IDLE)
            )
        else:
            drafter = NgramDrafter(self._config.ngram_min, self._config.ngram_max)
            request.guesses = RequestDrafting(drafter)

    def learn(self, rows: int, tokens: int, guesses: int, elapsed_s: float) -> None:
        """A step of `rows` answers and no prompts computed so many tokens, drafts among them, and
        asked a draft model for `guesses` in a row behind them."""
        cost = self._costs[tokens] + guesses * self._draft_cost * self._costs[rows]
        self._stretch.learn(rows, cost, elapsed_s, is_drafted=bool(guesses) or tokens > rows)

    def _expected(self) -> float:
        """Of the draft model with the next request: as with the last ones, but now and then as if
        nothing were known."""
        self._num_guessed_for += 1
        if self._num_guessed_for % TRY_EVERY == 1:
            return MODEL_PRIOR
        return min(self._of_model.chance, MODEL_PRIOR)

    def want(self, request: Request, most: int, rows: int) -> int:
        """How many guesses the draft model is asked for, behind what the step samples."""
        if request.guesses is None or not request.follows:
            return 0
        return min(most, self._worth(request.guesses.guessed.chance, rows, self._draft_cost))

    def propose(self, request: Request, most: int, rows: int) -> list[int]:
        """Drafts for a request all of whose tokens are known, in a step of so many rows."""
        guesses = request.guesses
        if guesses is None:
            return []
        count = min(most, self._worth(guesses.guessed.chance, rows))
        drafts = guesses.drafter.propose(request.tokens, count) if count > 0 else []
        if request.matcher is None:
            return drafts
        refused, drafts = drafts, request.matcher.admitted(drafts)
        if refused and not drafts:
            guesses.guessed.learn(1, 0)  # wrong, as is known without a step
        forced = self._forced(request, guesses, most, rows)
        guesses.is_forced = len(forced) > len(drafts)
        return forced if guesses.is_forced else drafts

    def _forced(
        self, request: Request, guesses: RequestDrafting, most: int, rows: int
    ) -> list[int]:
        """As far as the grammar leaves one text: guesses that need no past and are mostly right."""
        assert request.matcher is not None
        count = min(most, self._worth(guesses.forced.chance, rows))
        run = request.matcher.forced_run(count) if count > 0 else []
        return request.matcher.admitted(run)

    def awaits(self, running: Iterable[Request], rows: int) -> bool:
        """Whether to plan ahead would keep one of these from drafts that are likely to be right."""
        return any(self._is_likely(request, rows) for request in running)

    def _is_likely(self, request: Request, rows: int) -> bool:
        guesses = request.guesses
        if guesses is None or request.phase is not RequestPhase.RUNNING or not request.num_pending:
            return False
        if request.matcher is not None and len(self._forced(request, guesses, 2, rows)) == 2:
            return True  # the first of them is on its way
        if not self._worth(guesses.guessed.chance, rows):
            return False
        guess = guesses.drafter.propose(request.tokens, 1)
        guesses.awaited = guess[0] if guess else None
        return bool(guess)

    def _worth(self, chance: float, rows: int, draft_cost: float = 0.0) -> int:
        """How many drafts in a row give most tokens for what the step costs."""
        costs, fixed, stretch = self._costs, self._costs[rows], self._stretch[rows]
        count, most, likely, tokens = 0, 1.0 / fixed, 1.0, 1.0
        for drafts in range(1, self._config.max_drafts + 1):
            likely *= chance
            if likely < LEAST_CHANCE:
                break
            tokens += likely
            cost = costs[rows * (1 + drafts)] + drafts * draft_cost * fixed
            gain = tokens / (cost * stretch)
            if gain > most:
                count, most = drafts, gain
        return count
