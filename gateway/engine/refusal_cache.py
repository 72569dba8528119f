"""Cache of the engine's recent refusals, by account.

A server with ten times the load that it can serve would spend its time refusing requests. So a
refusal may state for how long it is valid (`ErrorInfo.stands_s`, at most a quarter of a second).
During that time, further requests of the same account get the same refusal, before their prompts
are rendered and without a message to the engine. The module is pure: time is an argument.
"""

from __future__ import annotations

from protocol.engine.messages import Account
from protocol.wire.errors import ErrorInfo, ServingError, error_from

MAX_ENTRIES = 4096


class RefusalCache:
    """Refusals that are still valid. Requests without an account share one entry."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, ErrorInfo]] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, account: Account | None, refusal: ServingError, now: float) -> None:
        """Store a refusal, if it states how long it is valid. Pass only refusals of requests with
        one choice, because all later requests of the account get the same refusal.

        Only the data of the exception is stored, because its traceback would keep the refused
        request in memory.
        """
        if refusal.stands_s > 0:
            if len(self._until) >= MAX_ENTRIES:
                self._remove_expired(now)
            self._until[_key(account)] = now + refusal.stands_s, refusal.info()

    def get(self, account: Account | None, now: float) -> ServingError | None:
        """Return the valid refusal of this account, as a new exception; None if there is none."""
        until, refusal = self._until.get(_key(account), (now, None))
        return error_from(refusal) if refusal is not None and now < until else None

    def _remove_expired(self, now: float) -> None:
        self._until = {name: entry for name, entry in self._until.items() if now < entry[0]}


def _key(account: Account | None) -> str:
    return account.name if account is not None else ""
