"""Accounts share the engine: of those whose requests wait, who was served least goes first.

What is shared out are computed tokens, of prompts and of answers, each counted once: what a cache
had costs nothing, nor does what a preemption causes to be computed again. The laws:

- an account's count only grows while it has requests that wait. So while two accounts both have
  such requests, neither is served more than the other for long, however much either asks for;
- when an account begins to wait, its count is brought within one `burst` of the level of those who
  are being served. So who was away has a head start, but no claim on all the time he was away; and
  who was alone, and had everything, owes at most as much;
- a request's priority is worth a head start, too: less than one burst. It decides who goes first,
  and does not buy a larger share.

Requests without an account are one account, called "".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from engine_core.speculation.step_costs import StepCosts
from protocol.messages import Limits

MAX_KEPT = 4096
"""With more, accounts that have nothing open are forgotten."""
BURST_STEPS = 64
"""A burst is as long as the longest request, but no more than so many full steps."""
RECENT_S = 30.0
"""Two accounts that asked within so long of now share the engine, though one may be silent."""
PART, LEAST_PART = 4, 64
"""While they do, a step has a quarter of its prompt tokens, or 64, where costs are not known ..."""
SHORT, TIMES = 8, 2.0
"""... and else as many as take twice the time of a prompt so short: who asks for one will wait for
half of such a step, and then takes twice as long as alone ..."""
DEAREST = 2.0
"""... but not so few that each costs more than so many times what it does in a full step."""
LONGER = 1.05
"""A step that takes so many times as long is another's to wait for."""


def squash(priority: int) -> float:
    """In (-1, 1), and the greater of two priorities is the greater (as far as floats tell): what is
    bounded can be outweighed, by waiting or by being served less."""
    return priority / (1 + abs(priority))


def part_of(full: int, costs: StepCosts | None) -> int:
    """Of a step with `full` tokens, how many it has while accounts share the engine. `costs` where
    they are known: a power of two then, or all of them."""
    if costs is None:
        return max(full // PART, LEAST_PART)
    longest, dearest = TIMES * costs[SHORT], DEAREST * costs[full] / full
    sizes = [1 << bit for bit in range(full.bit_length())]
    most = max((size for size in sizes if costs[size] <= longest), default=1)
    worthy = (size for size in sizes if size >= most and costs[size] <= size * dearest)
    return next(worthy, full)


@dataclass(slots=True, eq=False)
class AccountUsage:
    """served   tokens, with what `FairShare.begin` forgot or lent"""

    name: str = ""
    served: float = 0.0


class FairShare:
    """burst   in tokens
    part    most prompt tokens in a step, while accounts share the engine and fewer stream
    """

    def __init__(self, limits: Limits, step_costs: Sequence[tuple[int, float]] = ()) -> None:
        """step_costs: see WorkerReady."""
        longest = min(limits.max_len, BURST_STEPS * limits.token_budget)
        self.burst = longest + limits.token_budget
        self._costs = StepCosts(step_costs) if step_costs else None
        self.part = part_of(limits.token_budget, self._costs)
        self._level = 0.0
        self._last: AccountUsage | None = None  # that asked
        self._last_at = self._other_at = -inf  # and when any other did
        self._by_name: dict[str, AccountUsage] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def of(self, name: str, num_open: Callable[[str], int]) -> AccountUsage:
        """`num_open`: requests of an account, by its name, to know which are worth keeping."""
        share = self._by_name.get(name)
        if share is None:
            if len(self._by_name) >= MAX_KEPT:
                self._by_name = {n: kept for n, kept in self._by_name.items() if num_open(n)}
            share = self._by_name[name] = AccountUsage(name)
        return share

    def note(self, share: AccountUsage, now: float) -> None:
        """It asks for something now, in seconds of a steady clock."""
        if share is not self._last:
            self._last, self._other_at = share, self._last_at
        self._last_at = now

    def are_several(self, now: float) -> bool:
        """Whether more than one asked of late: then nobody's prompts fill whole steps, which the
        next one to come would have to wait for."""
        return now - self._other_at < RECENT_S

    def is_longer(self, tokens: int, others: int) -> bool:
        """Whether a step of so many tokens takes longer with so many others, as far as is known."""
        costs = self._costs
        return costs is not None and costs[tokens + others] > LONGER * costs[tokens]

    def begin(self, share: AccountUsage) -> None:
        """From now on it has requests that wait."""
        share.served = self.brought_near(share)

    def brought_near(self, share: AccountUsage) -> float:
        """What it would have been served, if it began to wait now."""
        return min(max(share.served, self._level - self.burst), self._level + self.burst)

    def choose(self, share: AccountUsage) -> None:
        """Of those who want prompts computed, it goes first."""
        self._level = max(self._level, share.served)
