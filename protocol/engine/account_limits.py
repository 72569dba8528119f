"""Accounts, and the part of an account's limits that one of several engines enforces."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency")
"""The fields of Account that several engines share."""


class Account(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The account that a request is charged to, and the limits of the account; 0: no limit. The
    engine counts the requests of an account from all clients together.
    """

    name: str
    requests_per_minute: int = 0
    #: Most tokens of prompts and answers.
    tokens_per_minute: int = 0
    #: Most requests that have been accepted and have not ended.
    concurrency: int = 0
    #: Most tokens of prompt and answer together.
    max_len: int = 0
    #: The account's requests are sent to `parts` engines. This one enforces part number `part`,
    #: from 0, of its limits, except of `max_len` (`limit_part`).
    part: int = 0
    parts: Annotated[int, Meta(ge=1)] = 1


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
