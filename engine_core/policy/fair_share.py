"""Fair share between accounts: the waiting account that was served least goes first.

The unit of service is the computed token, of prompts and answers, each counted once. Cached tokens
are free, and so are tokens recomputed after a preemption.

- An account's count grows only while it has waiting requests. So while two accounts both have
  waiting requests, neither is served more than the other for long, however much either sends.
- When an account starts to wait, its count is moved to within `max_credit` of the accounts being
  served. So an account that was away gets a head start, but no claim to all the time it was away;
  an account that had the engine to itself owes at most as much.
- A request's priority is a bounded head start of less than `max_credit`. It decides the order, but
  does not buy a larger share.

Requests without an account share the account "".

The functions at the end apply this order to running requests: whose prompt is computed next, whose
decode pauses for a newcomer, and which requests are preempted for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from engine_core.policy.accounts import AccountUsage
from engine_core.request import Request, RequestPhase
from engine_core.speculation.step_costs import StepCosts
from protocol.messages import Limits

MAX_KEPT = 4096
"""Above this number, accounts without open requests are removed."""
BURST_STEPS = 64
"""`max_credit` is the length of the longest request, but at most this many full steps."""
RECENT_S = 30.0
"""Two accounts that sent a request within this time share the engine, even if one is idle now."""
PART, LEAST_PART = 4, 64
"""While accounts share the engine and step costs are unknown, a step computes a quarter of its
prompt tokens, but at least 64.
"""
SHORT, TIMES = 8, 2.0
"""If costs are known, a step may take twice the time of a prompt of SHORT tokens. A request with
such a prompt then waits for half a step on average, and takes about twice as long as alone.
"""
DEAREST = 2.0
"""The step is never made so small that a token costs more than this many times its cost in a full
step.
"""
LONGER = 1.05
"""A step that takes this many times as long counts as longer."""


def squash(priority: int) -> float:
    """Map a priority to (-1, 1), preserving its order as far as floats can.

    A bounded value can be outweighed by waiting longer, or by having been served less.
    """
    return priority / (1 + abs(priority))


def prefill_budget_when_shared(full: int, costs: StepCosts | None) -> int:
    """Return the prompt tokens of a step while accounts share the engine.

    `full` is the token budget. If `costs` are known, the result is a power of two or `full`.
    """
    if costs is None:
        return max(full // PART, LEAST_PART)
    longest, dearest = TIMES * costs[SHORT], DEAREST * costs[full] / full
    sizes = [1 << bit for bit in range(full.bit_length())]
    smallest = max((size for size in sizes if costs[size] <= longest), default=1)
    worthy = (size for size in sizes if size >= smallest and costs[size] <= size * dearest)
    return next(worthy, full)


class FairShare:
    """Tokens served to each account, and the order of accounts that follows from them."""

    def __init__(self, limits: Limits, step_costs: Sequence[tuple[int, float]] = ()) -> None:
        """Create it without accounts. `step_costs` are described in WorkerReady."""
        longest = min(limits.max_len, BURST_STEPS * limits.token_budget)
        #: Largest head start of an account, in tokens.
        self.max_credit = longest + limits.token_budget
        self._costs = StepCosts(step_costs) if step_costs else None
        #: Most prompt tokens in a step while accounts share the engine and fewer requests decode.
        self.shared_prefill_budget = prefill_budget_when_shared(limits.token_budget, self._costs)
        self._level = 0.0
        self._last: AccountUsage | None = None  # the account of the latest request
        self._last_at = self._other_at = -inf  # its time, and that of any other account's latest
        self._by_name: dict[str, AccountUsage] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str, num_open: Callable[[str], int]) -> AccountUsage:
        """Return the usage of an account, creating it if needed.

        `num_open` returns the number of an account's open requests, to decide which accounts to
        keep.
        """
        usage = self._by_name.get(name)
        if usage is None:
            if len(self._by_name) >= MAX_KEPT:
                self._by_name = {n: kept for n, kept in self._by_name.items() if num_open(n)}
            usage = self._by_name[name] = AccountUsage(name)
        return usage

    def on_request(self, usage: AccountUsage, now: float) -> None:
        """Record a request of this account, `now` in seconds of a steady clock."""
        if usage is not self._last:
            self._last, self._other_at = usage, self._last_at
        self._last_at = now

    def is_shared(self, now: float) -> bool:
        """Whether more than one account sent requests recently.

        If so, no account's prompts fill whole steps, because the next request of another would wait
        for them.
        """
        return now - self._other_at < RECENT_S

    def is_step_longer(self, tokens: int, others: int) -> bool:
        """Whether a step of `tokens` takes longer with `others` more tokens, if costs are known."""
        costs = self._costs
        return costs is not None and costs[tokens + others] > LONGER * costs[tokens]

    def on_wait_started(self, usage: AccountUsage) -> None:
        """Adjust the account's count when its first request starts to wait."""
        usage.served = self.clamped_service(usage)

    def clamped_service(self, usage: AccountUsage) -> float:
        """Return the count the account would have if it started to wait now."""
        return min(max(usage.served, self._level - self.max_credit), self._level + self.max_credit)

    def on_scheduled(self, usage: AccountUsage) -> None:
        """Raise the service level to this account's, because its prompt is scheduled next."""
        self._level = max(self._level, usage.served)


# ---- running requests


def prefill_order(running: Sequence[Request]) -> list[Request]:
    """Return the requests with more than one token to compute, least served account first.

    The requests of one account stay in the order of `running`.
    """
    prefills = [r for r in running if r.phase is RequestPhase.RUNNING and r.num_uncomputed > 1]
    first: dict[AccountUsage, float] = {}
    for request in prefills:
        first.setdefault(request.account_usage, request.virtual_time)
    return sorted(prefills, key=lambda r: first[r.account_usage]) if len(first) > 1 else prefills


def goes_before(newcomer: Request, request: Request) -> bool:
    """Whether a newcomer goes before a running request. Never within one account."""
    if newcomer.account_usage is request.account_usage:
        return False
    return (newcomer.virtual_time, newcomer.rank) < (request.virtual_time, request.rank)


def paused_decodes(decodes: Sequence[Request], newcomer: Request) -> set[Request]:
    """Return the decodes that may skip the step in which a newcomer starts.

    These are the requests of accounts that were served more than the newcomer's.
    """
    return {request for request in decodes if goes_before(newcomer, request)}


def preemption_victims(newcomer: Request, running: Sequence[Request]) -> list[Request]:
    """Return the requests that may be preempted for a newcomer, from the end of `running`.

    Their accounts were served more, by more tokens than it costs to compute the request again. So
    less is lost than the unfairness amounted to. The difference stays the same, so a request is not
    preempted in turn until the other account has been served as much.
    """
    return [
        request
        for request in reversed(running)
        if request.phase is RequestPhase.RUNNING
        and request.account_usage is not newcomer.account_usage
        and request.virtual_time - len(request.tokens) > newcomer.virtual_time
    ]
