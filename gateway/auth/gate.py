"""Access control. Requests pass `Gate.admit` before a byte of their body is read. Only CORS
preflights from allowed origins, which carry no key, skip it: they pass `Gate.check_head` (checks 1
and 2).

The checks, in this order:

1. the path is well-formed (`request_head.py`);
2. the Host is allowed and, if the server has no keys, the Origin too;
3. the path, as it was sent, spells letter by letter the rule of the route that Flask has matched;
4. the caller's key is valid and has the scope that the route requires. A public route needs no key,
   and with `public_metrics` neither do the metrics.

If no route matched, or if check 3 fails, a request without a valid key gets 401, not 404. So a
client without a key cannot discover which routes exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from gateway.auth.caller import ANONYMOUS, Caller, CallerHeaders, api_key_in
from gateway.auth.keys import Keyring
from gateway.auth.request_head import (
    HostRule,
    OriginRule,
    host_name,
    matches_rule,
    path_error,
    path_of,
)
from protocol.config.gateway import GatewayConfig
from protocol.shared.api_keys import Scope
from protocol.wire.errors import RequestError
from protocol.wire.loopback import is_loopback

RequiredScope = Scope | Literal["public"]
"""The scope that a route requires. "public": no key is required."""
PREFLIGHT_AGE_S = 600
"""Seconds for which browsers may cache the answer to a preflight."""
PREFLIGHT_HEADER = "Access-Control-Request-Method"
_REQUESTED_HEADERS = "Access-Control-Request-Headers"
_EXPOSED = "Retry-After, X-Request-Id, Request-Id, X-Ignored-Fields, X-Resume"
_NO_HOST_NEEDED: Final = "HTTP/1.0"
_SITE_HEADER = "Sec-Fetch-Site"
"""Header in which browsers send whether a page of another origin has caused a request."""
_OTHER_SITES = {"cross-site", "same-site"}
_SAFE = {"GET", "HEAD", "OPTIONS"}
"""Methods that change nothing. Links of other sites may lead to the server's own page."""
_UNDECLARED = {"HEAD", "OPTIONS"}
"""Flask adds these methods to a route itself. OPTIONS only lists the other methods."""
_IMPLIED = {"HEAD": "get"}
"""Method -> the declared method whose scope it requires."""


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
    """403: the key, host or origin does not permit this request."""

    code = "forbidden"


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The method, target and headers of a request, and the route that they matched."""

    method: str
    #: The request target as it was sent, not decoded.
    target: str
    protocol: str
    #: Rule of the matched route; None if no route matched.
    rule: str | None
    #: IP address of the connected client.
    peer: str
    headers: CallerHeaders

    @property
    def origin(self) -> str:
        """Origin of the web page that sent the request; "" if it did not come from one."""
        return self.headers.get("Origin", "")

    @property
    def is_foreign(self) -> bool:
        """Whether the request may change something, and its headers say that a page of another
        origin has caused it."""
        return self.method not in _SAFE and self.headers.get(_SITE_HEADER, "") in _OTHER_SITES

    @property
    def is_preflight(self) -> bool:
        """Whether this request is a CORS preflight: OPTIONS with `Origin` and
        `Access-Control-Request-Method`."""
        method = self.headers.get(PREFLIGHT_HEADER, "")
        return self.method == "OPTIONS" and bool(self.origin and method)


class DeclaredScope(Protocol):
    """The scope of one method of one route. `gateway.http.route.Operation` has these fields."""

    @property
    def rule(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def scope(self) -> RequiredScope: ...


class RoutingRule(Protocol):
    """The fields of `werkzeug.routing.Rule` that are read here."""

    rule: str
    methods: set[str] | None


class Scopes:
    """The scopes that all routes require, as declared (`http/route.py`).

    Raises ValueError if a method of a rule in `rules` has no declared scope. The server then does
    not start, so no route is open by mistake.
    """

    def __init__(self, rules: Iterable[RoutingRule], declared: Iterable[DeclaredScope]) -> None:
        self._required: Mapping[tuple[str, str], RequiredScope] = {
            (each.rule, each.method): each.scope for each in declared
        }
        undeclared = sorted(
            f"{method} {rule.rule}"
            for rule in rules
            for method in (rule.methods or set()) - _UNDECLARED
            if (rule.rule, method.lower()) not in self._required
        )
        if undeclared:
            raise ValueError(f"no scope is declared for {', '.join(undeclared)}")

    def required(self, rule: str, method: str) -> RequiredScope | None:
        """Return the required scope; None: any valid key is enough."""
        return self._required.get((rule, _IMPLIED.get(method, method.lower())))


class Gate:
    """Admits or refuses requests.

    keyring  returns the current keys; None if the server has no keys and requires none
    """

    def __init__(
        self, config: GatewayConfig, scopes: Scopes, keyring: Callable[[], Keyring | None]
    ) -> None:
        self._hosts = HostRule.from_options(config.host, config.allowed_host)
        self._origins = OriginRule(frozenset(origin.lower() for origin in config.cors_origin))
        self._scopes = scopes
        self._keyring = keyring
        #: Scopes of routes that need no key.
        self._open: frozenset[RequiredScope] = frozenset(
            ("public", "metrics") if config.public_metrics else ("public",)
        )

    def admit(self, head: RequestHead) -> Caller:
        """Check a request, as this module describes, and return its caller. Raises MalformedTarget,
        NoSuchRoute, Unauthenticated or Forbidden if a check fails."""
        self.check_head(head)
        required: RequiredScope | None = None
        if head.rule is not None:
            if not matches_rule(path_of(head.target), head.rule):
                self._authenticate(head)
                raise NoSuchRoute("this path does not exist")
            required = self._scopes.required(head.rule, head.method)
        if required in self._open:
            return ANONYMOUS
        caller = self._authenticate(head)
        if required is not None and required not in caller.scopes:
            raise Forbidden(_missing_scope(caller, required))
        return caller

    def admit_as(self, head: RequestHead, caller: Caller) -> Caller:
        """Return the caller of a request that this process makes on the caller's behalf. Raises
        Forbidden if the caller's key lacks the scope that the route requires."""
        required = self._scopes.required(head.rule, head.method) if head.rule else None
        if required is not None and required != "public" and required not in caller.scopes:
            raise Forbidden(_missing_scope(caller, required))
        return caller

    def check_head(self, head: RequestHead) -> None:
        """Check the target, Host and Origin, which do not depend on the route or the caller. Raises
        MalformedTarget if the target or the Host is malformed, and Forbidden if the Host or the
        Origin is not allowed."""
        if (reason := path_error(path_of(head.target))) is not None:
            raise MalformedTarget(reason)
        self._check_host(head)
        if head.origin or head.is_foreign:
            self._check_origin(head)

    def cors_headers(self, head: RequestHead) -> dict[str, str]:
        """Return the headers that let a page of an allowed origin read the response."""
        if not self._origins.allowed:
            return {}
        headers = {"Vary": "Origin"}
        if not head.origin or not self._origins.admits(head.origin):
            return headers
        headers["Access-Control-Allow-Origin"] = head.origin
        if not head.is_preflight:
            return headers | {"Access-Control-Expose-Headers": _EXPOSED}
        return headers | {
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": head.headers.get(_REQUESTED_HEADERS, ""),
            "Access-Control-Max-Age": str(PREFLIGHT_AGE_S),
        }

    def is_allowed_preflight(self, head: RequestHead) -> bool:
        """Return whether this is a CORS preflight from an allowed origin. Preflights carry no
        key."""
        return head.is_preflight and self._origins.admits(head.origin)

    def _check_host(self, head: RequestHead) -> None:
        authority = head.headers.get("Host", "")
        if not authority and head.protocol == _NO_HOST_NEEDED:
            return
        name = host_name(authority)
        if name is None:
            raise MalformedTarget("the Host header is missing or malformed")
        if not self._hosts.admits(name):
            raise Forbidden(
                "the host name in the Host header is not allowed; the server's operator can allow "
                "it with --allowed-host"
            )

    def _check_origin(self, head: RequestHead) -> None:
        """Refuse requests from pages of other sites if the server has no keys.

        The browser hides the responses from such a page but sends its requests. On a server with
        keys, the page would need a key. Browsers send the Origin with each request that may change
        something; if a proxy or an extension removes it, `is_foreign` still shows it.
        """
        is_own = self._origins.is_own(head.origin, head.headers.get("Host", ""))
        if self._keyring() is None and not is_own and not self._origins.admits(head.origin):
            raise Forbidden(
                "requests from web pages of this origin are not allowed; the server's operator can "
                "allow them with --cors-origin"
            )

    def _authenticate(self, head: RequestHead) -> Caller:
        """Return the caller that the key identifies. Raises Unauthenticated."""
        keyring = self._keyring()
        if keyring is None:
            return Caller.without_key(head.headers, is_local=is_loopback(head.peer))
        key = api_key_in(head.headers)
        if key is None:
            raise Unauthenticated(
                "an API key is required: Authorization: Bearer KEY, or x-api-key: KEY"
            )
        caller = keyring.find(key)
        if caller is None:
            raise Unauthenticated("the API key is invalid")
        return caller


def _missing_scope(caller: Caller, required: RequiredScope) -> str:
    """Return the error message for a caller without the required scope."""
    if not caller.name:
        return "this server has no API keys, so only clients on its own machine may do this"
    return f"this API key lacks the scope {required!r}"
