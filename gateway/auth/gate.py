"""The one way in. Every request passes `Gate.admit` before a byte of its body is read.

In this order: the target is spelled as we spell it; the Host and the Origin are ours; then, of the
endpoint that *matched* (never of a path that is looked at a second time), the scope that it has
declared, and a key that has it. Where nothing matched, only who has a key hears that: to others
every route looks alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.auth.caller import NOBODY, Caller, CallerHeaders, secret_in
from gateway.auth.hosts import HostRule, OriginRule, name_in
from gateway.auth.keys import Keyring
from gateway.auth.refusals import Forbidden, MalformedTarget, NoSuchRoute, Unauthenticated
from gateway.auth.scopes import Demand, Scopes
from gateway.auth.target import fault_in, path_in, spells
from protocol.config.gateway import GatewayConfig
from protocol.hosts import is_loopback

PREFLIGHT_AGE_S = 600
PREFLIGHT_HEADER = "Access-Control-Request-Method"
_ASKED_HEADERS = "Access-Control-Request-Headers"
_EXPOSED = "Retry-After, X-Request-Id, Request-Id, X-Ignored-Fields, X-Resume"
_NO_HOST_NEEDED: Final = "HTTP/1.0"


@dataclass(frozen=True, slots=True)
class Visit:
    """A request, before its body.

    target    as it was sent
    rule      of the route that matched; None: none did
    peer      the address of who is connected
    """

    method: str
    target: str
    protocol: str
    rule: str | None
    peer: str
    headers: CallerHeaders

    @property
    def origin(self) -> str:
        """Of the web page that asks; "" where it is none."""
        return self.headers.get("Origin", "")

    @property
    def is_preflight(self) -> bool:
        asked = self.headers.get(PREFLIGHT_HEADER, "")
        return self.method == "OPTIONS" and bool(self.origin and asked)


class Gate:
    """keyring   gives the present keys; None: the server has none"""

    def __init__(
        self, config: GatewayConfig, scopes: Scopes, keyring: Callable[[], Keyring | None]
    ) -> None:
        self._hosts = HostRule.of(config.host, config.allowed_host)
        self._origins = OriginRule(frozenset(origin.lower() for origin in config.cors_origin))
        self._scopes = scopes
        self._keyring = keyring

    def admit(self, visit: Visit) -> Caller:
        """Who it is. Raises a refusal."""
        self.check_manners(visit)
        demand: Demand | None = None
        if visit.rule is not None:
            if not spells(path_in(visit.target), visit.rule):
                self._caller(visit)
                raise NoSuchRoute("there is no such path")
            demand = self._scopes.demand(visit.rule, visit.method)
        if demand == "public":
            return NOBODY
        caller = self._caller(visit)
        if demand is not None and demand not in caller.scopes:
            raise Forbidden(_lacks(caller, demand))
        return caller

    def check_manners(self, visit: Visit) -> None:
        """What holds whoever asks, and for whatever."""
        if (fault := fault_in(path_in(visit.target))) is not None:
            raise MalformedTarget(fault)
        self._check_host(visit)
        if visit.origin:
            self._check_origin(visit)

    def cors_headers(self, visit: Visit) -> dict[str, str]:
        """What lets a page read the answer, where its origin is allowed to. The answer to a
        preflight has more."""
        if not self._origins.allowed:
            return {}
        headers = {"Vary": "Origin"}
        if not visit.origin or not self._origins.admits(visit.origin):
            return headers
        headers["Access-Control-Allow-Origin"] = visit.origin
        if not visit.is_preflight:
            return headers | {"Access-Control-Expose-Headers": _EXPOSED}
        return headers | {
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": visit.headers.get(_ASKED_HEADERS, ""),
            "Access-Control-Max-Age": str(PREFLIGHT_AGE_S),
        }

    def answers_preflight(self, visit: Visit) -> bool:
        """A browser's question whether its page may ask: it comes without a key."""
        return visit.is_preflight and self._origins.admits(visit.origin)

    def _check_host(self, visit: Visit) -> None:
        authority = visit.headers.get("Host", "")
        if not authority and visit.protocol == _NO_HOST_NEEDED:
            return
        name = name_in(authority)
        if name is None:
            raise MalformedTarget("the Host header is missing, or no host")
        if not self._hosts.admits(name):
            raise Forbidden(
                "this server does not answer to the name in the Host header (--allowed-host)"
            )

    def _check_origin(self, visit: Visit) -> None:
        """A page of another site can send requests without being able to read the answers, but it
        cannot have a key. Where there are no keys, only the pages that were allowed may ask."""
        own = self._origins.is_own(visit.origin, visit.headers.get("Host", ""))
        if self._keyring() is None and not own and not self._origins.admits(visit.origin):
            raise Forbidden(
                "this server takes no requests from pages of this origin (--cors-origin)"
            )

    def _caller(self, visit: Visit) -> Caller:
        keyring = self._keyring()
        if keyring is None:
            return Caller.unknown(visit.headers, is_local=is_loopback(visit.peer))
        secret = secret_in(visit.headers)
        if secret is None:
            raise Unauthenticated(
                "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
            )
        caller = keyring.find(secret)
        if caller is None:
            raise Unauthenticated("this API key is not good here")
        return caller


def _lacks(caller: Caller, demand: Demand) -> str:
    if not caller.name:
        return "without keys, only who is on the server's own machine may do this"
    return f"this API key lacks the scope {demand!r}"
