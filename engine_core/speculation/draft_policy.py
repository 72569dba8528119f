"""Draft policy: decides which requests get drafts, and how many.

Drafts never change an answer, only its speed: the sampled tokens are those of plain decoding
(protocol/worker/steps.py). The number of drafts is chosen so that the expected tokens per cost are
highest:

- Tokens: n consecutive drafts give 1 + p + ... + p ** n expected tokens per row, because the i-th
  draft counts only if all before it are right. The acceptance rate p is estimated per request, as
  the share of its checked drafts that were right.
- Cost: n drafts in each of B rows make a step of B * (1 + n) tokens. The cost of a step by its
  number of tokens is measured on the worker (step_costs.py): a few more tokens cost almost nothing,
  but the cost of many grows with their number. Each draft by a draft model adds c steps of B
  tokens, where c is the cost of the draft model relative to the main model. The overhead of steps
  with drafts beyond these costs is estimated from step times (overhead.py).

The model's own head (mtp) is treated like a draft model, except that it cannot compute positions
long after the model has (schedule/drafting.py).

To draft for a request, a draft model must also compute the request's prompt. So if the draft
model's recent drafts were wrong, it is used for few of the next requests.

A step's drafts must be known when the step is planned. So no step is planned ahead while drafts are
in flight, or while a request that is likely to get right drafts waits for a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine_core.requests.drafting import PRIOR, AcceptanceTally, ModelDrafter, RequestDrafting
from engine_core.requests.request import Request, RequestPhase
from engine_core.speculation.ngram import NgramDrafter
from engine_core.speculation.overhead import DraftOverhead
from engine_core.speculation.step_costs import StepCosts
from protocol.config.engine import EngineConfig

MODELS = ("model", "mtp")
"""The methods whose drafts a model in the worker proposes: a draft model, or the model's own head.
"""
MODEL_PRIOR = 0.7
"""The prior for drafts of a draft model. Its drafts are usually better than n-gram lookups."""
MODEL_IDLE_DECAY = 0.995
"""`IDLE_DECAY` for a draft model. Its drafts cost more, so they are tried again more rarely."""
RETRY_EVERY = 16
"""If the draft model did badly, one in this many new requests still uses it with the prior."""
MIN_PROBABILITY = 0.2
"""Drafts less likely to be right than this are not verified, because drafts prevent planning ahead.
"""


class Speculation:
    """The draft policy of one engine.

    - draft_cost: cost of one draft by the draft model, in steps
    - step_costs: (tokens, seconds) of steps as measured by the worker; may be empty
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

    @property
    def is_enabled(self) -> bool:
        """Whether any request can get drafts."""
        return self._config.speculation != "none"

    @property
    def has_head(self) -> bool:
        """Whether the model's own head proposes the drafts."""
        return self._config.speculation == "mtp"

    def start(self, request: Request) -> None:
        """Choose the drafter of an accepted request."""
        kind = self._config.speculation
        if kind == "none" or (kind in MODELS and self._draft_cost >= 1):
            return  # a draft that costs a whole step saves nothing
        if not request.samples:
            # Its blocks are read by others. A head's entries are not handed over.
            request.uses_draft_model = kind == "model"
        elif kind in MODELS:
            acceptance = self._expected_acceptance()
            pays = self.best_count(acceptance, 1, self._draft_cost) > 0
            request.uses_draft_model = pays and kind == "model"
            request.uses_head = pays and kind == "mtp"
            request.drafting = self.new_drafting(AcceptanceTally(acceptance, MODEL_IDLE_DECAY))
        else:
            request.drafting = self.new_drafting(AcceptanceTally(PRIOR))

    def keeps_head(self, request: Request) -> bool:
        """Return whether the head computes the request.

        If not even a step of this request alone would gain from drafts, the head stops for good,
        because entries that it does not compute soon are missing later. Without a grammar, the
        request then gets no drafts, and its steps are planned ahead. Other requests try the head
        again.
        """
        if request.uses_head and request.drafting is not None:
            acceptance = request.drafting.tally.acceptance
            request.uses_head = self.best_count(acceptance, 1, self._draft_cost) > 0
            if not request.uses_head and request.matcher is None:
                request.drafting = None
        return request.uses_head

    def new_drafting(self, tally: AcceptanceTally) -> RequestDrafting:
        """Return a new drafter of the configured kind. `tally` counts its drafts."""
        if self._config.speculation in MODELS:
            return RequestDrafting(ModelDrafter(), tally, self._model_tally)
        drafter = NgramDrafter(self._config.ngram_min, self._config.ngram_max)
        return RequestDrafting(drafter, tally)

    def observe(self, rows: int, tokens: int, num_drafts: int, elapsed_s: float) -> None:
        """Record the time of a step without prompts, to estimate the overhead of drafts.

        - rows, tokens: the size of the step; `tokens` includes drafts
        - num_drafts: number of consecutive drafts that the step requested from the draft model
        """
        cost = self._costs[tokens] + num_drafts * self._draft_cost * self._costs[rows]
        self.overhead.observe(rows, cost, elapsed_s, is_drafted=bool(num_drafts) or tokens > rows)

    def _expected_acceptance(self) -> float:
        """Return the acceptance to assume for the draft model's drafts for a new request.

        It is the recent rate of all requests, but at most the prior. For one in RETRY_EVERY
        requests it is the prior, so that the draft model is tried again.
        """
        self._num_started += 1
        if self._num_started % RETRY_EVERY == 1:
            return MODEL_PRIOR
        return min(self._model_tally.acceptance, MODEL_PRIOR)

    def num_draft_model_tokens(self, request: Request, max_tokens: int, rows: int) -> int:
        """Return how many drafts to request from the draft model or head, in a step of `rows` rows.
        The result is at most `max_tokens`, and 0 if neither computes the request."""
        if request.drafting is None or not (request.uses_draft_model or request.uses_head):
            return 0
        return min(
            max_tokens, self.best_count(request.drafting.tally.acceptance, rows, self._draft_cost)
        )

    def propose(self, request: Request, max_tokens: int, rows: int) -> list[int]:
        """Return at most `max_tokens` drafts for a request, for a step of `rows` rows. The request
        must have no token in flight."""
        drafting = request.drafting
        if drafting is None:
            return []
        count = min(max_tokens, self.best_count(drafting.tally.acceptance, rows))
        drafts = drafting.drafter.propose(request.tokens, count) if count > 0 else []
        if request.matcher is None:
            return drafts
        refused, drafts = drafts, request.matcher.admitted_prefix(drafts)
        if refused and not drafts:
            drafting.tally.observe(1, 0)  # the grammar has excluded the first draft
        forced = self._forced_drafts(request, drafting, max_tokens, rows)
        drafting.is_forced = len(forced) > len(drafts)
        return forced if drafting.is_forced else drafts

    def _forced_drafts(
        self, request: Request, drafting: RequestDrafting, max_tokens: int, rows: int
    ) -> list[int]:
        """Return the next tokens, at most `max_tokens`, if the grammar allows only one text. They
        are usually right, and follow from the grammar alone."""
        assert request.matcher is not None
        count = min(max_tokens, self.best_count(drafting.forced_tally.acceptance, rows))
        forced = request.matcher.forced_tokens(count) if count > 0 else []
        return request.matcher.admitted_prefix(forced)

    def should_wait(self, running: Iterable[Request], rows: int) -> bool:
        """Return whether the next step should wait until the tokens in flight are known.

        If it is planned earlier, requests with a token in flight get no drafts. So it should wait
        if the drafts of some request are likely to be right.
        """
        return self.is_enabled and any(
            self._has_likely_drafts(request, rows) for request in running
        )

    def _has_likely_drafts(self, request: Request, rows: int) -> bool:
        drafting = request.drafting
        if drafting is None or request.phase is not RequestPhase.RUNNING or not request.num_pending:
            return False
        if (
            request.matcher is not None
            and len(self._forced_drafts(request, drafting, 2, rows)) == 2
        ):
            return True  # the first forced token is in flight; the second could be a draft
        if not self.best_count(drafting.tally.acceptance, rows):
            return False
        guess = drafting.drafter.propose(request.tokens, 1)
        drafting.awaited_guess = guess[0] if guess else None
        return bool(guess)

    def best_count(self, acceptance: float, rows: int, draft_cost: float = 0.0) -> int:
        """Return the number of consecutive drafts that gives the most expected tokens per cost.

        - acceptance: probability that a draft is right if all before it are
        - rows: number of rows in the step
        - draft_cost: cost of one draft, in steps; 0 for drafts that cost nothing to propose
        """
        costs, fixed, overhead = self._costs, self._costs[rows], self.overhead[rows]
        count, best_gain, probability, tokens = 0, 1.0 / fixed, 1.0, 1.0
        for drafts in range(1, self._config.max_drafts + 1):
            probability *= acceptance
            if probability < MIN_PROBABILITY:
                break
            tokens += probability
            cost = costs[rows * (1 + drafts)] + drafts * draft_cost * fixed
            gain = tokens / (cost * overhead)
            if gain > best_gain:
                count, best_gain = drafts, gain
        return count
