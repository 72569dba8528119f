"""Draft policy: which requests get drafts, and how many.

Drafts never change an answer, only its speed (protocol/steps.py: sampled tokens are those of plain
decoding). The cost of a step by its number of tokens is measured on the worker (step_costs.py): the
first few more tokens cost next to nothing, later ones as much as their multiplications. The
overhead of having drafts at all is estimated from steps (overhead.py). The number of drafts
maximises tokens per cost: n drafts in each of B rows give 1 + p + ... + p ** n tokens a row for the
cost of B * (1 + n) tokens. A draft of a draft model adds c steps, for all rows together. The
acceptance rate p is estimated per request: the share of the checked drafts that were right. The
i-th draft of a run is right with probability p ** i.

A draft model must also compute a request's prompt to draft for it. So if it was wrong for recent
requests, it is used for few of the next.

A step's drafts must be known when it is planned. While drafts are in flight, or a request that is
likely to get good drafts waits for a token, no step is planned ahead.
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
"""Acceptance rate before any draft was checked; it weighs as much as one checked draft."""
FORGET = 0.9
"""Decay of past counts per step with drafts."""
FORGET_IDLE = 0.98
"""Decay per step without drafts: a request that did badly is eventually tried again."""
MODEL_PRIOR = 0.7
"""The prior of a draft model, which was chosen for the purpose."""
MODEL_IDLE = 0.995
"""Slower decay for a draft model, because its drafts cost more than n-gram lookups."""
TRY_EVERY = 16
"""If the draft model did badly, one in this many new requests still uses it with the prior."""
FORCED_PRIOR = 0.95
"""The prior of a token that spells the grammar's only possible text in the usual way."""
MIN_CHANCE = 0.2
"""Less likely drafts do not pay, because they prevent planning ahead."""


class Drafter(Protocol):
    """Proposes the next tokens of one request."""

    def propose(self, tokens: array[int], max_tokens: int) -> list[int]:
        """Return up to `max_tokens` >= 1 tokens likely to follow `tokens`."""
        ...


class ModelDrafter:
    """The draft model's proposals from the last step; void once more tokens are known."""

    def __init__(self) -> None:
        self._num_known = -1
        self._proposed: list[int] = []

    def on_proposed(self, num_known: int, proposed: list[int]) -> None:
        """Store the proposals that follow `num_known` tokens."""
        self._num_known, self._proposed = num_known, proposed

    def propose(self, tokens: array[int], max_tokens: int) -> list[int]:
        return self._proposed[:max_tokens] if len(tokens) == self._num_known else []


@dataclass(slots=True)
class AcceptanceTally:
    """Decaying counts of one kind of drafts: `accepted` of `checked`."""

    #: The acceptance rate before any draft was checked.
    prior: float
    #: Decay per step without drafts.
    idle: float = FORGET_IDLE
    accepted: float = 0.0
    checked: float = 0.0

    @property
    def acceptance(self) -> float:
        return (self.accepted + self.prior) / (self.checked + 1)

    def observe(self, proposed: int, accepted: int) -> None:
        """Count `proposed` drafts, of which the first `accepted` were right.

        The next one was wrong; those after it were not checked.
        """
        forget = FORGET if proposed else self.idle
        self.accepted = self.accepted * forget + accepted
        self.checked = self.checked * forget + min(accepted + 1, proposed)


@dataclass(slots=True)
class RequestDrafting:
    """The drafter of one request and its acceptance, also of drafts forced by its grammar."""

    drafter: Drafter
    #: Of this request's drafts.
    tally: AcceptanceTally = field(default_factory=lambda: AcceptanceTally(PRIOR))
    #: Tally of all requests with such a drafter, if one request predicts the next.
    shared_tally: AcceptanceTally | None = None
    #: Of the drafts that its grammar forced.
    forced_tally: AcceptanceTally = field(default_factory=lambda: AcceptanceTally(FORCED_PRIOR))
    #: Prediction of the token in flight, if a step has waited for it.
    awaited_guess: int | None = None
    #: The drafts in flight are forced by the grammar.
    is_forced: bool = False

    def on_proposed(self, num_known: int, proposed: list[int]) -> None:
        """Store what the draft model proposes after `num_known` tokens."""
        assert isinstance(self.drafter, ModelDrafter), "there is no draft model"
        self.drafter.on_proposed(num_known, proposed)

    def observe(self, proposed: int, accepted: int, token: int) -> None:
        """Count the drafts that were in flight.

        `token` is the first sampled token. Having waited for it in vain counts as a wrong draft.
        """
        right = (proposed, accepted)
        if not proposed and self.awaited_guess is not None:
            right = (1, int(token == self.awaited_guess))
        self.tally.observe(*((0, 0) if self.is_forced else right))
        if self.shared_tally is not None and not self.is_forced and right[0]:
            self.shared_tally.observe(*right)
        self.forced_tally.observe(*(right if self.is_forced else (0, 0)))
        self.awaited_guess, self.is_forced = None, False


class Speculation:
    """The draft policy of one engine.

    - draft_cost: cost of one draft of the draft model, in steps
    - step_costs: measured (tokens, cost) of a step; may be empty
    """

    def __init__(
        self,
        config: EngineConfig,
        draft_cost: float = 0.0,
        step_costs: Sequence[tuple[int, float]] = (),
    ) -> None:
        self._config = config
        self._draft_cost = draft_cost
        self._costs = StepCosts.from_measurements(config.draft_width, step_costs)
        self.overhead = DraftOverhead()
        self._model_tally = AcceptanceTally(MODEL_PRIOR)
        self._num_started = 0

    def start(self, request: Request) -> None:
        """Choose the drafter of an accepted request."""
        kind = self._config.speculation
        if kind == "none" or (kind == "model" and self._draft_cost >= 1):
            return  # a draft model that costs a full step per token saves nothing
        if not request.samples:
            request.uses_draft_model = kind == "model"
        elif kind == "model":
            chance = self._expected_acceptance()
            request.uses_draft_model = self.best_count(chance, 1, self._draft_cost) > 0
            request.drafting = self.new_drafting(AcceptanceTally(chance, MODEL_IDLE))
        else:
            request.drafting = self.new_drafting(AcceptanceTally(PRIOR))

    def new_drafting(self, tally: AcceptanceTally) -> RequestDrafting:
        """Return the configured drafter for a request, with the tally of its drafts."""
        if self._config.speculation == "model":
            return RequestDrafting(ModelDrafter(), tally, self._model_tally)
        drafter = NgramDrafter(self._config.ngram_min, self._config.ngram_max)
        return RequestDrafting(drafter, tally)

    def observe(self, rows: int, tokens: int, num_drafts: int, elapsed_s: float) -> None:
        """Record a step's time.

        The step had `rows` rows, no prompts, and `tokens` tokens, drafts included. It requested
        `num_drafts` consecutive drafts of the draft model.
        """
        cost = self._costs[tokens] + num_drafts * self._draft_cost * self._costs[rows]
        self.overhead.observe(rows, cost, elapsed_s, is_drafted=bool(num_drafts) or tokens > rows)

    def _expected_acceptance(self) -> float:
        """Return the draft model's expected acceptance for the next request.

        It is the recent rate, but now and then the prior, to retry.
        """
        self._num_started += 1
        if self._num_started % TRY_EVERY == 1:
            return MODEL_PRIOR
        return min(self._model_tally.acceptance, MODEL_PRIOR)

    def num_draft_model_tokens(self, request: Request, max_tokens: int, rows: int) -> int:
        """Return how many drafts to request of the draft model after the sampled token."""
        if request.drafting is None or not request.uses_draft_model:
            return 0
        return min(
            max_tokens, self.best_count(request.drafting.tally.acceptance, rows, self._draft_cost)
        )

    def propose(self, request: Request, max_tokens: int, rows: int) -> list[int]:
        """Return drafts for a request whose tokens are all known, in a step of `rows` rows."""
        drafting = request.drafting
        if drafting is None:
            return []
        count = min(max_tokens, self.best_count(drafting.tally.acceptance, rows))
        drafts = drafting.drafter.propose(request.tokens, count) if count > 0 else []
        if request.matcher is None:
            return drafts
        refused, drafts = drafts, request.matcher.admitted_prefix(drafts)
        if refused and not drafts:
            drafting.tally.observe(1, 0)  # the grammar rules it out without a step
        forced = self._forced_drafts(request, drafting, max_tokens, rows)
        drafting.is_forced = len(forced) > len(drafts)
        return forced if drafting.is_forced else drafts

    def _forced_drafts(
        self, request: Request, drafting: RequestDrafting, max_tokens: int, rows: int
    ) -> list[int]:
        """Return the tokens that the grammar forces, which are usually right and need no past."""
        assert request.matcher is not None
        count = min(max_tokens, self.best_count(drafting.forced_tally.acceptance, rows))
        run = request.matcher.forced_tokens(count) if count > 0 else []
        return request.matcher.admitted_prefix(run)

    def should_wait(self, running: Iterable[Request], rows: int) -> bool:
        """Whether planning ahead would deny a request drafts that are likely to be right."""
        return any(self._has_likely_drafts(request, rows) for request in running)

    def _has_likely_drafts(self, request: Request, rows: int) -> bool:
        drafting = request.drafting
        if drafting is None or request.phase is not RequestPhase.RUNNING or not request.num_pending:
            return False
        if (
            request.matcher is not None
            and len(self._forced_drafts(request, drafting, 2, rows)) == 2
        ):
            return True  # the first one is in flight
        if not self.best_count(drafting.tally.acceptance, rows):
            return False
        guess = drafting.drafter.propose(request.tokens, 1)
        drafting.awaited_guess = guess[0] if guess else None
        return bool(guess)

    def best_count(self, chance: float, rows: int, draft_cost: float = 0.0) -> int:
        """Return the number of consecutive drafts with the most expected tokens per cost."""
        costs, fixed, overhead = self._costs, self._costs[rows], self.overhead[rows]
        count, best_gain, likely, tokens = 0, 1.0 / fixed, 1.0, 1.0
        for drafts in range(1, self._config.max_drafts + 1):
            likely *= chance
            if likely < MIN_CHANCE:
                break
            tokens += likely
            cost = costs[rows * (1 + drafts)] + drafts * draft_cost * fixed
            gain = tokens / (cost * overhead)
            if gain > best_gain:
                count, best_gain = drafts, gain
        return count
