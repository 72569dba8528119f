"""The part of an account's limits that one of several engines enforces."""

from __future__ import annotations

from protocol.engine.messages import Account

LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency")
"""The fields of Account that several engines share."""


def limit_part(limit: int, account: Account) -> int:
    """Return the engine's part of one of the account's limits. The parts of all engines add up to
    `limit`."""
    return _part(limit, account.part, account.parts)


def has_part(account: Account, part: int, parts: int) -> bool:
    """Return whether engine number `part` of `parts` may serve any request of the account: whether
    its part of each limit is more than nothing."""
    return all(_part(limit, part, parts) for name in LIMITS if (limit := getattr(account, name)))


def _part(limit: int, part: int, parts: int) -> int:
    return limit // parts + (part < limit % parts)
