"""Fair share between accounts: the waiting account that was served least goes first.

The service of an account is the number of tokens, of prompts and answers, that were computed for
it. Cached tokens are free, and so are tokens recomputed after a preemption.

- While several accounts have waiting requests, their services stay close to each other, however
  many requests each account sends.
- When an account starts to wait, its service is clamped to within `max_credit` of the current
  service level. So an account that was idle gets a bounded head start, not all the service that
  it missed. An account that had the engine to itself has a bounded deficit.
- A request's priority is a head start (or a handicap) of less than `max_credit` tokens. It changes
  the order, but not the account's share. The virtual time of a request is the service of its
  account minus this head start; the request with the smallest one goes first.

Requests without an account share the account "".

The functions at the end of the file apply this order to running requests. They choose the prompts
to compute next, the decodes to pause for a newcomer, and the requests to preempt for a newcomer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from engine_core.requests.request import AccountUsage, Request, RequestPhase
from engine_core.speculation.step_costs import StepCosts
from protocol.engine.messages import Limits

MAX_ACCOUNTS = 4096
"""Above this number of accounts, those without open requests are removed."""
MAX_CREDIT_STEPS = 64
"""`max_credit` is the length of the longest request, but at most about this many full steps."""
RECENT_S = 30.0
"""Two accounts that sent a request within this time share the engine, even if one is idle now."""
SHARED_DIVISOR, MIN_SHARED_TOKENS = 4, 64
"""While accounts share the engine and step costs are unknown, a step has at most a quarter of the
token budget for prompts, but at least 64 tokens.
"""
SHORT_PROMPT_TOKENS, MAX_TIME_RATIO = 8, 2.0
"""If step costs are known, a shared step may take MAX_TIME_RATIO times as long as a step of
SHORT_PROMPT_TOKENS. A short prompt then waits for half a shared step on average, so it takes about
twice as long as it would alone.
"""
MAX_TOKEN_COST_RATIO = 2.0
"""A shared step is not made so small that each token costs more than this many times as much as in
a full step.
"""
LONGER_RATIO = 1.05
"""A step is called longer than another if it takes more than this many times as long."""


def squash(priority: int) -> float:
    """Map a priority to the interval (-1, 1), keeping the order. So the effect of a priority is
    bounded, and a long wait or little service can outweigh it."""
    return priority / (1 + abs(priority))


def prefill_budget_when_shared(full: int, costs: StepCosts | None) -> int:
    """Return the maximum number of prompt tokens in a step while accounts share the engine.

    `full` is the token budget. Without `costs`, the result is `full // SHARED_DIVISOR`, but at
    least MIN_SHARED_TOKENS. With them it is a power of two or `full`: the largest power of two that
    takes at most MAX_TIME_RATIO times as long as a short prompt, or more if a token would otherwise
    cost more than MAX_TOKEN_COST_RATIO times as much as in a full step.
    """
    if costs is None:
        return max(full // SHARED_DIVISOR, MIN_SHARED_TOKENS)
    max_cost = MAX_TIME_RATIO * costs[SHORT_PROMPT_TOKENS]
    max_token_cost = MAX_TOKEN_COST_RATIO * costs[full] / full
    sizes = [1 << bit for bit in range(full.bit_length())]
    smallest = max((size for size in sizes if costs[size] <= max_cost), default=1)
    efficient = (
        size for size in sizes if size >= smallest and costs[size] <= size * max_token_cost
    )
    return next(efficient, full)


class FairShare:
    """Compares accounts by the tokens that they were served, and keeps the difference bounded."""

    def __init__(self, limits: Limits, step_costs: Sequence[tuple[int, float]] = ()) -> None:
        """Start without accounts. WorkerReady describes `step_costs`."""
        longest = min(limits.max_len, MAX_CREDIT_STEPS * limits.token_budget)
        #: Maximum head start of an account, in tokens.
        self.max_credit = longest + limits.token_budget
        self._costs = StepCosts(step_costs) if step_costs else None
        #: Maximum number of prompt tokens in a step while accounts share the engine. If more
        #: requests than this decode, the maximum is the number of decodes.
        self.shared_prefill_budget = prefill_budget_when_shared(limits.token_budget, self._costs)
        #: Highest service of an account at the time when one of its prompts was scheduled.
        self._level = 0.0
        #: Account of the latest request.
        self._last: AccountUsage | None = None
        #: Time of the latest request, and of the latest request of any other account.
        self._last_at = self._other_at = -inf
        self._by_name: dict[str, AccountUsage] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str, num_open: Callable[[str], int]) -> AccountUsage:
        """Return the usage of an account, adding the account if it is unknown. If there are
        already MAX_ACCOUNTS or more, those without open requests are removed first.

        `num_open` returns the number of an account's open requests.
        """
        usage = self._by_name.get(name)
        if usage is None:
            if len(self._by_name) >= MAX_ACCOUNTS:
                self._by_name = {n: kept for n, kept in self._by_name.items() if num_open(n)}
            usage = self._by_name[name] = AccountUsage(name)
        return usage

    def on_request(self, usage: AccountUsage, now: float) -> None:
        """Record that this account sent a request at `now` (seconds of a steady clock)."""
        if usage is not self._last:
            self._last, self._other_at = usage, self._last_at
        self._last_at = now

    def is_shared(self, now: float) -> bool:
        """Return whether more than one account sent requests within the last RECENT_S seconds.

        If so, steps are kept short, because the next request of another account must wait for the
        present step.
        """
        return now - self._other_at < RECENT_S

    def is_step_longer(self, tokens: int, others: int) -> bool:
        """Return whether adding `others` tokens to a step of `tokens` tokens makes it noticeably
        longer (LONGER_RATIO). Return False if the costs of steps are unknown."""
        costs = self._costs
        return costs is not None and costs[tokens + others] > LONGER_RATIO * costs[tokens]

    def on_wait_started(self, usage: AccountUsage) -> None:
        """Clamp the service of an account that starts to wait (`clamped_service`). The caller calls
        this when the account's first request starts to wait."""
        usage.served = self.clamped_service(usage)

    def clamped_service(self, usage: AccountUsage) -> float:
        """Return the service that the account would have if it started to wait now: within
        `max_credit` of the current service level."""
        return min(max(usage.served, self._level - self.max_credit), self._level + self.max_credit)

    def on_scheduled(self, usage: AccountUsage) -> None:
        """Raise the service level to this account's service, because its prompt is scheduled."""
        self._level = max(self._level, usage.served)


# ---- running requests


def charge_rows(requests: Iterable[Request], counts: Iterable[int]) -> None:
    """Charge each request's account for the positions that a step computes for the first time.

    counts   number of positions of each request, from `num_scheduled` on
    """
    for request, count in zip(requests, counts, strict=True):
        ahead = request.num_scheduled + count
        num_new = ahead - request.num_charged
        if num_new > 0:
            request.account_usage.served += num_new
            request.num_charged = ahead


def prefill_order(prefills: Sequence[Request]) -> Sequence[Request]:
    """Return the running requests `prefills`, which have more than one token to compute, least
    served account first. The requests of one account stay in their order."""
    first: dict[AccountUsage, float] = {}
    for request in prefills:
        first.setdefault(request.account_usage, request.virtual_time)
    return sorted(prefills, key=lambda r: first[r.account_usage]) if len(first) > 1 else prefills


def goes_before(newcomer: Request, request: Request) -> bool:
    """Return whether the waiting request `newcomer` goes before the running `request`, because its
    virtual time is smaller. Always false within one account."""
    if newcomer.account_usage is request.account_usage:
        return False
    return (newcomer.virtual_time, newcomer.rank) < (request.virtual_time, request.rank)


def paused_decodes(decodes: Sequence[Request], newcomer: Request) -> set[Request]:
    """Return the running `decodes` that may skip the step in which `newcomer` starts: those of
    accounts that were served more than the newcomer's."""
    return {request for request in decodes if goes_before(newcomer, request)}


def preemption_victims(newcomer: Request, running: Sequence[Request]) -> list[Request]:
    """Return the running requests that may be preempted for a newcomer, youngest first.

    A request may be preempted if its virtual time exceeds the newcomer's by more than the request's
    number of tokens. Computing it again then costs less than the difference in service. Preemption
    does not change the service of either account. So the victim cannot preempt the newcomer in turn
    until the newcomer's account has been served as much.
    """
    return [
        request
        for request in reversed(running)
        if request.phase is RequestPhase.RUNNING
        and request.account_usage is not newcomer.account_usage
        and request.virtual_time - len(request.tokens) > newcomer.virtual_time
    ]
