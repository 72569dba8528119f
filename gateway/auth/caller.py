"""Who asks: what is known of the sender of one request, and what it may do.

Where the server has keys, a caller is the name of one of them. Where it has none, everybody may
ask; a key that is sent all the same is not checked, and tells only whose stored things are whose.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

from protocol.api_keys import ALL_SCOPES, KeyEntry, Scope
from protocol.errors import InvalidRequest
from protocol.messages import Account

_BEARER = "bearer "
SEPARATOR = "/"
"""No name of a key, and no namespace, has one."""


class CallerHeaders(Protocol):
    """Of a request: names are taken in any case."""

    def get(self, name: str, default: str, /) -> str: ...


def secret_in(headers: CallerHeaders) -> str | None:
    """`Authorization: Bearer KEY`, or else Anthropic's `x-api-key: KEY`. None: the request has
    none."""
    scheme = headers.get("Authorization", "")
    if scheme[: len(_BEARER)].lower() == _BEARER and (key := scheme[len(_BEARER) :].strip()):
        return key
    return headers.get("X-Api-Key", "").strip() or None


@dataclass(frozen=True, slots=True)
class Caller:
    """name       of its key; "" where the server has none
    scopes     what it may do
    owner      what it stores belongs to this
    sharing    cached prompts are shared only within it
    account    who pays, and what it may use; None: nobody counts
    max_n      0: the server's limit alone
    priority   the least it may ask for; None: any
    """

    name: str
    scopes: frozenset[Scope]
    owner: str
    sharing: str = ""
    account: Account | None = None
    max_n: int = 0
    priority: int | None = None

    @classmethod
    def of(cls, name: str, entry: KeyEntry) -> Caller:
        group = f"group:{entry.namespace}" if entry.namespace else f"key:{name}"
        account = Account(
            name=name,
            requests_per_minute=entry.requests_per_minute,
            tokens_per_minute=entry.tokens_per_minute,
            concurrency=entry.concurrency,
            max_len=entry.max_len,
        )
        return cls(
            name=name,
            scopes=frozenset(entry.scopes),
            owner=f"key:{name}",
            sharing=group,
            account=account,
            max_n=entry.max_n,
            priority=entry.priority,
        )

    @classmethod
    def unknown(cls, headers: CallerHeaders, *, is_local: bool) -> Caller:
        """Of a server without keys. From elsewhere nobody administers it."""
        key = secret_in(headers)
        owner = hashlib.sha256(key.encode()).hexdigest()[:32] if key else ""
        return cls("", ALL_SCOPES if is_local else ALL_SCOPES - {"admin"}, owner)

    def namespace(self, salt: str) -> str:
        """Of the prefix cache, for a request with this salt."""
        return self.sharing + SEPARATOR + salt if self.sharing else salt

    def labels(self, name: str) -> list[str]:
        """Of a request of which it is told that it is called so: for whoever may abort anybody's,
        and for the caller itself."""
        return [name, self._own(name)] if self.name else [name]

    def sought(self, name: str) -> str:
        """The label of what it may abort, where it calls it so."""
        return name if "admin" in self.scopes else self._own(name)

    def _own(self, name: str) -> str:
        return self.owner + SEPARATOR + name

    def longest(self, max_len: int) -> int:
        """Most tokens of prompt and answer together, where the model takes so many."""
        own = self.account.max_len if self.account is not None else 0
        return min(own, max_len) if own else max_len

    def check_wishes(self, n: int, priority: int) -> None:
        """Raises InvalidRequest, naming the field, for what this key may not ask."""
        if self.max_n and n > self.max_n:
            raise InvalidRequest(f"n: this key may ask for {self.max_n} choices", param="n")
        if self.priority is not None and priority < self.priority:
            raise InvalidRequest(
                f"priority: this key may ask for {self.priority} or more", param="priority"
            )


NOBODY = Caller("", frozenset(), "")
"""Whoever asks for what is open to all."""
