"""The caller of one request, and its permissions.

If the server has keys, a caller is the name of one of them. Without keys every request is accepted.
A key that is sent anyway is not checked; it only separates the stored responses of different
clients.
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
"""Never part of a key's name or a namespace."""


class CallerHeaders(Protocol):
    """The headers of a request. Names are case-insensitive."""

    def get(self, name: str, default: str, /) -> str: ...


def secret_in(headers: CallerHeaders) -> str | None:
    """Return the key of `Authorization: Bearer KEY`, or else of Anthropic's `x-api-key: KEY`."""
    scheme = headers.get("Authorization", "")
    if scheme[: len(_BEARER)].lower() == _BEARER and (key := scheme[len(_BEARER) :].strip()):
        return key
    return headers.get("X-Api-Key", "").strip() or None


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    #: Name of its key; "" if the server has no keys.
    name: str
    scopes: frozenset[Scope]
    #: Owner of the responses and runs that it stores.
    owner: str
    #: Cached prompts are shared only between callers with the same value.
    sharing: str = ""
    #: The account that is charged, and its limits; None: usage is not counted.
    account: Account | None = None
    #: Most choices of a request; 0: only the server's limit applies.
    max_n: int = 0
    #: Lowest priority value that it may request; None: any.
    priority: int | None = None

    @classmethod
    def from_key(cls, name: str, entry: KeyEntry) -> Caller:
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
    def without_key(cls, headers: CallerHeaders, *, is_local: bool) -> Caller:
        """Return the caller on a server without keys. Only local callers get the scope `admin`."""
        key = secret_in(headers)
        owner = hashlib.sha256(key.encode()).hexdigest()[:32] if key else ""
        return cls("", ALL_SCOPES if is_local else ALL_SCOPES - {"admin"}, owner)

    def namespace(self, salt: str) -> str:
        """Return the prefix cache's namespace for a request with this salt."""
        return self.sharing + SEPARATOR + salt if self.sharing else salt

    def labels(self, name: str) -> list[str]:
        """Return the labels of a request with the public id `name`.

        An admin aborts by the first label, the caller itself by the last.
        """
        return [name, self._own(name)] if self.name else [name]

    def abort_label(self, name: str) -> str:
        """Return the label by which this caller may abort the request with the public id `name`."""
        return name if "admin" in self.scopes else self._own(name)

    def _own(self, name: str) -> str:
        return self.owner + SEPARATOR + name

    def context_limit(self, max_len: int) -> int:
        """Return the most tokens of prompt and answer together; the model's limit is `max_len`."""
        own = self.account.max_len if self.account is not None else 0
        return min(own, max_len) if own else max_len

    def check_limits(self, n: int, priority: int) -> None:
        """Raise InvalidRequest, naming the field, if a value exceeds the limits of this key."""
        if self.max_n and n > self.max_n:
            raise InvalidRequest(f"n: {n} exceeds this API key's limit of {self.max_n}", param="n")
        if self.priority is not None and priority < self.priority:
            raise InvalidRequest(
                f"priority: {priority} is below this API key's minimum of {self.priority}",
                param="priority",
            )


ANONYMOUS = Caller("", frozenset(), "")
"""The caller of a public route."""
