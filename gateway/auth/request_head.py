"""Checks of a request's head that need no key: its target, its Host header and its Origin header.

**Target.** Proxies, libraries and servers disagree about `//`, dot segments and encoded slashes. If
two of them disagree, the path that one checks is not the path that the other serves. So exactly one
spelling of each path is served: the fixed parts of a route's rule must be sent letter by letter.
Variables may be percent-encoded. The target is checked as it was sent, before it is decoded.

**Host.** A web site can make its own name resolve to 127.0.0.1 (DNS rebinding). The browsers of its
visitors then send requests to a server on the visitor's machine and let the site's pages read the
responses. Such a request has the site's name in its Host header. So a server that listens on
loopback accepts only loopback names, addresses (which cannot be rebound) and the names that its
operator allows.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from urllib.parse import unquote, urlsplit

from protocol.wire.loopback import is_address, is_loopback

ANY_ORIGIN = "*"
MAX_SHOWN_CHARS = 200
_VARIABLE = re.compile(r"<(?:(?P<kind>\w+):)?\w+>")
_PATTERNS = {None: r"[^/]+", "string": r"[^/]+", "path": r".+"}
"""Kind of a variable in a rule -> what it matches."""
_UNPRINTABLE = re.compile(r"[^!-~]")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253})(?::(\d{1,5}))?")


# ---- target


def path_of(target: str) -> str:
    """Return the path of a request target `/path?query`, without decoding it."""
    return target.partition("?")[0]


def path_error(path: str) -> str | None:
    """Return the reason why a path is malformed; None if it is well-formed."""
    if not path.startswith("/"):
        return "the request target must begin with a slash"
    decoded = unquote(path, encoding="latin-1")
    if not path.isascii() or _has_control(decoded) or "\\" in decoded:
        return "the path contains characters that are not allowed"
    if "//" in path:
        return "the path contains an empty segment"
    if not {".", ".."}.isdisjoint(decoded.split("/")):
        return "the path contains dot segments"
    return None


def _has_control(text: str) -> bool:
    return any(letter < " " or letter == "\x7f" for letter in text)


def matches_rule(path: str, rule: str) -> bool:
    """Return whether an undecoded path matches a route's rule such as "/v1/models/<path:name>"."""
    return _pattern(rule).fullmatch(path) is not None


@cache
def _pattern(rule: str) -> re.Pattern[str]:
    """Return the pattern of a rule. The cache has at most one entry for each route."""
    parts, end = [], 0
    for variable in _VARIABLE.finditer(rule):
        parts += [re.escape(rule[end : variable.start()]), _PATTERNS[variable["kind"]]]
        end = variable.end()
    return re.compile("".join([*parts, re.escape(rule[end:])]))


def printable(path: str) -> str:
    """Return a path in a form that is safe in logs and errors: one line of bounded length."""
    shown = _UNPRINTABLE.sub(lambda found: f"%{ord(found[0]) & 0xFF:02X}", path[:MAX_SHOWN_CHARS])
    return shown + ("..." if len(path) > MAX_SHOWN_CHARS else "")


# ---- Host and Origin


def host_name(authority: str) -> str | None:
    """Return the name or address in a Host header, in lower case; None if it is malformed."""
    found = _AUTHORITY.fullmatch(authority)
    if found is None or (found[2] and int(found[2]) > 65535):
        return None
    return found[1].strip("[]").rstrip(".").lower() or None


@dataclass(frozen=True, slots=True)
class HostRule:
    """Decides which Host headers are accepted."""

    #: Accepted names, in lower case; None: every name is accepted.
    allowed: frozenset[str] | None

    @classmethod
    def from_options(cls, host: str, allowed: Collection[str]) -> HostRule:
        """Return the rule of a server that listens on `host`.

        allowed   names that the operator has added

        If `host` is not a loopback address and `allowed` is empty, every name is accepted. Such a
        server has API keys, which protect it against DNS rebinding, or --insecure-no-auth.
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
    """Decides which web pages may use the server from a visitor's browser."""

    #: Origins as browsers write them ("https://app.example"), in lower case; or ANY_ORIGIN.
    allowed: frozenset[str]

    def admits(self, origin: str) -> bool:
        """Return whether pages of `origin` may use the server."""
        return ANY_ORIGIN in self.allowed or origin.lower() in self.allowed

    @staticmethod
    def is_own(origin: str, authority: str) -> bool:
        """Return whether the page came from the host and port in the request's Host header."""
        try:
            return urlsplit(origin).netloc.lower() == authority.lower()
        except ValueError:
            return False
