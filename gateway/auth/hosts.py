"""Which names and origins a request may come under.

A page of any web site can have its own name resolve to 127.0.0.1 (DNS rebinding); its visitors'
browsers then take a server on their machine for that site, and hand the page what it says. Such a
request has the site's name as its Host. So a server that listens on loopback answers to the names
of loopback alone, to those that its operator allows, and to addresses: those cannot be rebound.
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
    """The name or address in a Host header, in lower case; None where it is malformed."""
    found = _AUTHORITY.fullmatch(authority)
    if found is None or (found[2] and int(found[2]) > 65535):
        return None
    return found[1].strip("[]").rstrip(".").lower() or None


@dataclass(frozen=True, slots=True)
class HostRule:
    """allowed   names, in lower case; None: any"""

    allowed: frozenset[str] | None

    @classmethod
    def of(cls, host: str, allowed: Collection[str]) -> HostRule:
        """Of who listens on `host`, with names that the operator adds. Elsewhere than on loopback
        any name is good, unless the operator names some: keys keep strangers out."""
        if not allowed and not is_loopback(host):
            return cls(None)
        return cls(frozenset(name.rstrip(".").lower() for name in (host, *allowed)))

    def admits(self, name: str) -> bool:
        if self.allowed is None or name in self.allowed:
            return True
        return name == "localhost" or name.endswith(".localhost") or is_address(name)


@dataclass(frozen=True, slots=True)
class OriginRule:
    """Which web pages may use the server from a visitor's browser.

    allowed   as browsers write them: "https://app.example"; or ANY_ORIGIN
    """

    allowed: frozenset[str]

    def admits(self, origin: str) -> bool:
        return ANY_ORIGIN in self.allowed or origin.lower() in self.allowed

    @staticmethod
    def is_own(origin: str, authority: str) -> bool:
        """Whether the page was served under the very name that is asked now."""
        try:
            return urlsplit(origin).netloc.lower() == authority.lower()
        except ValueError:
            return False
