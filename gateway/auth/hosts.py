"""Allowed host names and origins.

A web site can make its own name resolve to 127.0.0.1 (DNS rebinding). Its visitors' browsers then
send requests to a server on their machine and let the site's pages read the responses. Such a
request has the site's name in its Host header. So a server that listens on loopback accepts only
loopback names, addresses (which cannot be rebound) and the names that its operator allows.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from protocol.hosts import is_address, is_loopback

ANY_ORIGIN = "*"
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253})(?::(\d{1,5}))?")


def name_in(authority: str) -> str | None:
    """Return the name or address in a Host header, in lower case; None if it is malformed."""
    found = _AUTHORITY.fullmatch(authority)
    if found is None or (found[2] and int(found[2]) > 65535):
        return None
    return found[1].strip("[]").rstrip(".").lower() or None


@dataclass(frozen=True, slots=True)
class HostRule:
    """Decides which Host headers are accepted. `allowed`: names in lower case; None: any."""

    allowed: frozenset[str] | None

    @classmethod
    def from_options(cls, host: str, allowed: Collection[str]) -> HostRule:
        """Return the rule of a server that listens on `host`; the operator adds `allowed`.

        A server that does not listen on loopback accepts any name unless the operator lists some:
        it is protected by keys.
        """
        if not allowed and not is_loopback(host):
            return cls(None)
        return cls(frozenset(name.rstrip(".").lower() for name in (host, *allowed)))

    def admits(self, name: str) -> bool:
        if self.allowed is None or name in self.allowed:
            return True
        return name == "localhost" or name.endswith(".localhost") or is_address(name)


@dataclass(frozen=True, slots=True)
class OriginRule:
    """Decides which web pages may use the server from a visitor's browser.

    allowed   origins as browsers write them, such as "https://app.example"; or ANY_ORIGIN
    """

    allowed: frozenset[str]

    def admits(self, origin: str) -> bool:
        return ANY_ORIGIN in self.allowed or origin.lower() in self.allowed

    @staticmethod
    def is_own(origin: str, authority: str) -> bool:
        """Return whether the page was served by the host that the request is addressed to."""
        try:
            return urlsplit(origin).netloc.lower() == authority.lower()
        except ValueError:
            return False
