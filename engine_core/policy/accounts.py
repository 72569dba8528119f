"""Rate limits of accounts: requests and tokens per minute, and concurrent answers.

Requests from all gateway processes are counted together. If a model has several engines, each
enforces a part of the limits (protocol/engine/account_limits.py).

- Each limit per minute is a token bucket. It holds one minute's worth and fills evenly. A new
  account's buckets are full.
- A request and its prompt are charged when the request is accepted. The tokens of its answer are
  charged when they are generated, so the length of the answer need not be guessed. A request that
  costs more than the bucket holds is not refused; the overdraft delays the account's next request.
- Each request carries the limits of its account, so new limits apply from the next request on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from protocol.engine.account_limits import limit_part
from protocol.engine.messages import Account
from protocol.wire.errors import LimitReached

MINUTE_S = 60.0
BUSY_RETRY_S = 1.0
MAX_REPEAT_S = 0.25
"""Longest time for which a gateway may repeat a refusal without sending the request to the engine.

New limits of a key take effect after at most this time.
"""
MAX_ACCOUNTS = 4096
"""Above this number of accounts, those with full buckets are removed."""


@dataclass(slots=True)
class Bucket:
    """A token bucket: it holds `per_minute` tokens, and is filled at that rate."""

    #: Tokens missing from a full bucket. It exceeds `per_minute` after an overdraft.
    used: float = 0.0
    #: When `used` was last updated, in seconds of a steady clock.
    filled_at: float = 0.0
    per_minute: int = 0

    def refill(self, now: float) -> None:
        self.used = max(0.0, self.used - (now - self.filled_at) * self.per_minute / MINUTE_S)
        self.filled_at = now

    def wait_s(self, now: float) -> float:
        """Refill the bucket, and return the seconds until it holds one token; 0 if it does already.
        If the bucket can never hold one, return a minute."""
        self.refill(now)
        if not self.per_minute:
            return MINUTE_S
        return max(0.0, self.used + 1 - self.per_minute) * MINUTE_S / self.per_minute


@dataclass(slots=True)
class AccountBuckets:
    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)


class Accounts:
    """The rate limits of all accounts. The owner sets `now`, in seconds of a steady clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._buckets: dict[str, AccountBuckets] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def check(self, account: Account, num_open: int, *, is_first: bool) -> None:
        """Raise LimitReached, naming the limit, if the account may not start a request now.

        - num_open: number of the account's open requests
        - is_first: whether this is the first engine request of an HTTP request; only these count
          towards requests per minute
        """
        if account.concurrency and num_open >= limit_part(account.concurrency, account):
            raise LimitReached(
                f"concurrency: this key already has {account.concurrency:,} answers in progress",
                retry_after_s=BUSY_RETRY_S,
            )
        buckets = self._get_buckets(account)
        if is_first:
            self._check("requests", buckets.requests, account.requests_per_minute)
        self._check("tokens", buckets.tokens, account.tokens_per_minute)

    def charge_request(self, account: Account, num_tokens: int, *, is_first: bool) -> None:
        """Charge the account for a request that passed `check`, and for its prompt of `num_tokens`
        tokens. Charges for limits that the account does not have are ignored."""
        if is_first and account.requests_per_minute:
            self._get_buckets(account).requests.used += 1
        self.charge_tokens(account, num_tokens)

    def charge_tokens(self, account: Account, num_tokens: int) -> None:
        if account.tokens_per_minute:
            self._get_buckets(account).tokens.used += num_tokens

    def _check(self, unit: str, bucket: Bucket, limit: int) -> None:
        """Raise LimitReached if `bucket` is empty.

        limit   the account's limit, of which the bucket holds this engine's part; 0: none
        """
        if limit and (wait_s := bucket.wait_s(self.now)):
            raise LimitReached(
                f"{unit}_per_minute: this key has used up its {limit:,} {unit} per minute",
                retry_after_s=float(math.ceil(wait_s)),
                stands_s=min(wait_s, MAX_REPEAT_S),
            )

    def _get_buckets(self, account: Account) -> AccountBuckets:
        """Return the account's buckets, refilled up to now."""
        buckets = self._buckets.get(account.name)
        if buckets is None:
            if len(self._buckets) >= MAX_ACCOUNTS:
                self._remove_full()
            buckets = self._buckets[account.name] = AccountBuckets()
        limits = (account.requests_per_minute, account.tokens_per_minute)
        for bucket, per_minute in zip((buckets.requests, buckets.tokens), limits, strict=True):
            bucket.refill(self.now)
            bucket.per_minute = limit_part(per_minute, account)
        return buckets

    def _remove_full(self) -> None:
        for name, buckets in list(self._buckets.items()):
            buckets.requests.refill(self.now)
            buckets.tokens.refill(self.now)
            if not buckets.requests.used and not buckets.tokens.used:
                del self._buckets[name]
