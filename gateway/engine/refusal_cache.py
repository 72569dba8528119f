"""What the engine has just refused an account, and would refuse it again.

A server that is asked for ten times what it can do spends its time on saying no. So a refusal that
says for how long it stands (`ErrorInfo.stands_s`: at most a quarter of a second) is repeated to
whoever comes of the same account meanwhile, before a prompt is rendered and without asking the
engine: it decides, and this only remembers. Pure; time is an argument.
"""

from __future__ import annotations

from protocol.errors import ErrorInfo, ServingError, error_from
from protocol.messages import Account

MAX_KEPT = 4096


class StandingRefusals:
    """By account; requests without one are one account together."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, ErrorInfo]] = {}

    def note(self, account: Account | None, refusal: ServingError, now: float) -> None:
        """A request that was alone (of one choice) has been refused. The exception itself is not
        kept: it holds on to the request."""
        if refusal.stands_s > 0:
            if len(self._until) >= MAX_KEPT:
                self._forget(now)
            self._until[_name_of(account)] = now + refusal.stands_s, refusal.info()

    def find(self, account: Account | None, now: float) -> ServingError | None:
        """What stands against it; a fresh exception each time."""
        until, refusal = self._until.get(_name_of(account), (now, None))
        return error_from(refusal) if refusal is not None and now < until else None

    def _forget(self, now: float) -> None:
        self._until = {name: kept for name, kept in self._until.items() if now < kept[0]}


def _name_of(account: Account | None) -> str:
    return account.name if account is not None else ""
