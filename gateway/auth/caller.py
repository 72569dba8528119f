"""The caller of one request, and the permissions of the caller.

If the server has API keys, each key identifies one caller. If it has none, every request is
accepted. A client may send a key to such a server too. The key is not checked, but clients with
different keys cannot read each other's stored responses.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

from protocol.engine.messages import Account
from protocol.shared.api_keys import ALL_SCOPES, KeyEntry, Scope
from protocol.wire.errors import InvalidRequest

_BEARER = "bearer "
SEPARATOR = "/"
"""Joins the parts of a namespace. It never occurs in a key's name or in its namespace."""
LABEL_SEPARATOR = " "
"""Joins an owner and a public id. It occurs in no public id, not even in one that the client has
chosen (X-Request-Id). So no client can give its request the label of another's."""


class CallerHeaders(Protocol):
    """The headers of a request. Their names are case-insensitive."""

    def get(self, name: str, default: str, /) -> str: ...


def api_key_in(headers: CallerHeaders) -> str | None:
    """Return the API key that a client sent, or None. It is in `Authorization: Bearer KEY`, or else
    in Anthropic's `x-api-key: KEY`."""
    scheme = headers.get("Authorization", "")
    if scheme[: len(_BEARER)].lower() == _BEARER and (key := scheme[len(_BEARER) :].strip()):
        return key
    return headers.get("X-Api-Key", "").strip() or None


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, and the permissions and limits of the sender's API key."""

    #: Name of the caller's key; "" if the server has no keys.
    name: str
    scopes: frozenset[Scope]
    #: Owner of the responses and runs that the caller stores.
    owner: str
    #: Callers with the same value share cached prompts.
    cache_group: str = ""
    #: The account that is charged, and its limits; None: usage is not counted.
    account: Account | None = None
    #: Maximum number of choices of a request; 0: only the server's limit applies.
    max_n: int = 0
    #: Lowest priority value that a request may have; None: any value is allowed.
    priority: int | None = None

    @classmethod
    def from_key(cls, name: str, entry: KeyEntry) -> Caller:
        """Return the caller whose key has this name and entry in the keys file."""
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
            cache_group=group,
            account=account,
            max_n=entry.max_n,
            priority=entry.priority,
        )

    @classmethod
    def without_key(cls, headers: CallerHeaders, *, is_local: bool) -> Caller:
        """Return the caller of a request to a server without keys.

        is_local  whether the client runs on the server's machine; only such a caller gets the scope
                  `admin`
        """
        key = api_key_in(headers)
        owner = hashlib.sha256(key.encode()).hexdigest()[:32] if key else ""
        return cls("", ALL_SCOPES if is_local else ALL_SCOPES - {"admin"}, owner)

    def namespace(self, salt: str) -> str:
        """Return the name under which the prefix cache stores the prompts of a request with this
        salt."""
        return self.cache_group + SEPARATOR + salt if self.cache_group else salt

    def labels(self, name: str) -> list[str]:
        """Return the labels by which a request with the public id `name` can be aborted.

        The first is the id itself, for callers with the scope `admin`. If the caller has a key, the
        second is the id with the caller's owner name, for the caller itself. So callers without
        `admin` cannot abort each other's requests. On a server without keys, only callers with
        `admin` can abort a request.
        """
        return [name, self._owned(name)] if self.name else [name]

    def abort_label(self, name: str) -> str:
        """Return the label by which this caller may abort the request with the public id `name`, or
        find its timeline. It is the id itself for a caller with the scope `admin`. For others it
        contains the caller's owner name, so that they find only their own requests (see
        `labels`)."""
        return name if "admin" in self.scopes else self._owned(name)

    def _owned(self, name: str) -> str:
        return self.owner + LABEL_SEPARATOR + name

    def context_limit(self, max_len: int) -> int:
        """Return the maximum number of tokens of prompt and answer together: the lower one of
        `max_len`, the model's limit, and the key's limit."""
        own = self.account.max_len if self.account is not None else 0
        return min(own, max_len) if own else max_len

    def check_limits(self, n: int, priority: int) -> None:
        """Raise InvalidRequest, naming the field, if this key does not allow these values.

        n         number of choices
        priority  priority value; lower values are served first
        """
        if self.max_n and n > self.max_n:
            raise InvalidRequest(f"n: {n} exceeds this API key's limit of {self.max_n}", param="n")
        if self.priority is not None and priority < self.priority:
            raise InvalidRequest(
                f"priority: {priority} is below this API key's minimum of {self.priority}",
                param="priority",
            )


ANONYMOUS = Caller("", frozenset(), "")
"""The caller of every request to a public route."""
