"""What accounts have used of late, and whether they may have more.

Every client of the engine is counted here, so an account's limits hold however many gateway
processes ask in its name. The laws:

- what may be used per minute lies in a bucket that holds one minute's worth and fills evenly; a new
  account's buckets are full;
- requests are paid for when they are taken in, and so are their prompts; the tokens of an answer
  when they are there. So nobody has to guess how long an answer will be, and no request is too
  large: what was used beyond the limit is paid for by waiting, before the next one;
- limits come with each request, so new ones hold from the next request on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from engine_core.policy.admission import MAX_STANDS_S
from protocol.errors import LimitReached
from protocol.messages import Account

MINUTE_S = 60.0
BUSY_RETRY_S = 1.0
MAX_KEPT = 4096
"""With more, accounts that are as good as new are forgotten."""


@dataclass(slots=True)
class Bucket:
    """used    what is missing to one minute's worth; more than that after an overdraft
    at        when that was so, in seconds of a steady clock
    """

    used: float = 0.0
    at: float = 0.0
    per_minute: int = 0

    def fill(self, now: float) -> None:
        self.used = max(0.0, self.used - (now - self.at) * self.per_minute / MINUTE_S)
        self.at = now

    def missing_s(self, now: float) -> float:
        """How long until there is one in it."""
        self.fill(now)
        return max(0.0, self.used + 1 - self.per_minute) * MINUTE_S / self.per_minute


@dataclass(slots=True)
class _Use:
    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)


class Accounts:
    """now   seconds of a steady clock; whoever owns the clock says it"""

    def __init__(self) -> None:
        self.now = 0.0
        self._uses: dict[str, _Use] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def check(self, account: Account, num_open: int, *, is_first: bool) -> None:
        """Raises LimitReached, naming the limit, where the account may not have a request now.

        num_open   it has so many already
        is_first   of an answer: it counts as one of the requests per minute
        """
        if account.concurrency and num_open >= account.concurrency:
            raise LimitReached(
                f"concurrency: {account.concurrency:,} answers are being made for this key",
                retry_after_s=BUSY_RETRY_S,
            )
        use = self._use(account)
        if is_first:
            self._check("requests", use.requests)
        self._check("tokens", use.tokens)

    def take_in(self, account: Account, num_tokens: int, *, is_first: bool) -> None:
        """A request with so long a prompt, after `check`."""
        if is_first and account.requests_per_minute:
            self._use(account).requests.used += 1
        self.spend(account, num_tokens)

    def spend(self, account: Account, num_tokens: int) -> None:
        if account.tokens_per_minute:
            self._use(account).tokens.used += num_tokens

    def _check(self, what: str, bucket: Bucket) -> None:
        if bucket.per_minute and (missing_s := bucket.missing_s(self.now)):
            raise LimitReached(
                f"{what}_per_minute: the {bucket.per_minute:,} {what} per minute of this key are "
                "used up",
                retry_after_s=float(math.ceil(missing_s)),
                stands_s=min(missing_s, MAX_STANDS_S),
            )

    def _use(self, account: Account) -> _Use:
        """As of now."""
        use = self._uses.get(account.name)
        if use is None:
            if len(self._uses) >= MAX_KEPT:
                self._forget()
            use = self._uses[account.name] = _Use()
        limits = (account.requests_per_minute, account.tokens_per_minute)
        for bucket, per_minute in zip((use.requests, use.tokens), limits, strict=True):
            bucket.fill(self.now)
            bucket.per_minute = per_minute
        return use

    def _forget(self) -> None:
        for name, use in list(self._uses.items()):
            use.requests.fill(self.now)
            use.tokens.fill(self.now)
            if not use.requests.used and not use.tokens.used:
                del self._uses[name]
