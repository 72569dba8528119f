"""Access control. Every request passes `Gate.admit` before a byte of its body is read.

The checks, in this order:

1. the target is spelled canonically;
2. the Host and the Origin are allowed;
3. the key has the scope that the *matched* route declares. The path is not parsed a second time.

If no route matched, a request without a valid key gets 401, not 404, so that it cannot discover
which routes exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.auth.caller import ANONYMOUS, Caller, CallerHeaders, secret_in
from gateway.auth.hosts import HostRule, OriginRule, name_in
from gateway.auth.keys import Keyring
from gateway.auth.scopes import Demand, Scopes
from gateway.auth.target import fault_in, path_in, spells
from protocol.config.gateway import GatewayConfig
from protocol.errors import RequestError
from protocol.hosts import is_loopback

PREFLIGHT_AGE_S = 600
PREFLIGHT_HEADER = "Access-Control-Request-Method"
_REQUESTED_HEADERS = "Access-Control-Request-Headers"
_EXPOSED = "Retry-After, X-Request-Id, Request-Id, X-Ignored-Fields, X-Resume"
_NO_HOST_NEEDED: Final = "HTTP/1.0"


class MalformedTarget(RequestError):
    """400: the request target or the Host header is malformed."""

    code = "malformed_request"


class NoSuchRoute(RequestError):
    """404: no route has this path."""

    code = "not_found"


class Unauthenticated(RequestError):
    """401: no API key, or an invalid one."""

    code = "invalid_api_key"


class Forbidden(RequestError):
    """403: the key, host or origin is not allowed to do this."""

    code = "forbidden"


@dataclass(frozen=True, slots=True)
class Visit:
    """The head of a request."""

    method: str
    #: As it was sent.
    target: str
    protocol: str
    #: Rule of the matched route; None if no route matched.
    rule: str | None
    #: Address of the connected client.
    peer: str
    headers: CallerHeaders

    @property
    def origin(self) -> str:
        """Origin of the web page that sent the request; "" if it did not come from one."""
        return self.headers.get("Origin", "")

    @property
    def is_preflight(self) -> bool:
        method = self.headers.get(PREFLIGHT_HEADER, "")
        return self.method == "OPTIONS" and bool(self.origin and method)


class Gate:
    """Admits or refuses requests. `keyring` returns the current keys; None: there are none."""

    def __init__(
        self, config: GatewayConfig, scopes: Scopes, keyring: Callable[[], Keyring | None]
    ) -> None:
        self._hosts = HostRule.from_options(config.host, config.allowed_host)
        self._origins = OriginRule(frozenset(origin.lower() for origin in config.cors_origin))
        self._scopes = scopes
        self._keyring = keyring

    def admit(self, visit: Visit) -> Caller:
        """Return the caller. Raise one of the errors above."""
        self.check_target(visit)
        demand: Demand | None = None
        if visit.rule is not None:
            if not spells(path_in(visit.target), visit.rule):
                self._caller(visit)
                raise NoSuchRoute("this path does not exist")
            demand = self._scopes.demand(visit.rule, visit.method)
        if demand == "public":
            return ANONYMOUS
        caller = self._caller(visit)
        if demand is not None and demand not in caller.scopes:
            raise Forbidden(_lacks(caller, demand))
        return caller

    def check_target(self, visit: Visit) -> None:
        """Check the target, Host and Origin, which do not depend on the route or the caller."""
        if (fault := fault_in(path_in(visit.target))) is not None:
            raise MalformedTarget(fault)
        self._check_host(visit)
        if visit.origin:
            self._check_origin(visit)

    def cors_headers(self, visit: Visit) -> dict[str, str]:
        """Return the headers that let a page of an allowed origin read the response."""
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
            "Access-Control-Allow-Headers": visit.headers.get(_REQUESTED_HEADERS, ""),
            "Access-Control-Max-Age": str(PREFLIGHT_AGE_S),
        }

    def answers_preflight(self, visit: Visit) -> bool:
        """Return whether this is a preflight of an allowed origin. It carries no key."""
        return visit.is_preflight and self._origins.admits(visit.origin)

    def _check_host(self, visit: Visit) -> None:
        authority = visit.headers.get("Host", "")
        if not authority and visit.protocol == _NO_HOST_NEEDED:
            return
        name = name_in(authority)
        if name is None:
            raise MalformedTarget("the Host header is missing or malformed")
        if not self._hosts.admits(name):
            raise Forbidden(
                "the host name in the Host header is not allowed; the server's operator can allow "
                "it with --allowed-host"
            )

    def _check_origin(self, visit: Visit) -> None:
        """Refuse pages of other sites if the server has no keys.

        Such a page cannot read responses but can send requests. With keys, it would need one.
        """
        own = self._origins.is_own(visit.origin, visit.headers.get("Host", ""))
        if self._keyring() is None and not own and not self._origins.admits(visit.origin):
            raise Forbidden(
                "requests from web pages of this origin are not allowed; the server's operator can "
                "allow them with --cors-origin"
            )

    def _caller(self, visit: Visit) -> Caller:
        keyring = self._keyring()
        if keyring is None:
            return Caller.without_key(visit.headers, is_local=is_loopback(visit.peer))
        secret = secret_in(visit.headers)
        if secret is None:
            raise Unauthenticated(
                "an API key is required: Authorization: Bearer KEY, or x-api-key: KEY"
            )
        caller = keyring.find(secret)
        if caller is None:
            raise Unauthenticated("the API key is invalid")
        return caller


def _lacks(caller: Caller, demand: Demand) -> str:
    if not caller.name:
        return "this server has no API keys, so only clients on its own machine may do this"
    return f"this API key lacks the scope {demand!r}"
