"""The scope that each route requires, as its declaration says (`http/route.py`).

A route without one keeps the server from starting, so no route is open by mistake.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

from protocol.api_keys import Scope

Demand = Scope | Literal["public"]
"""The scope that a route requires. "public": no key is required."""

_IMPLIED = {"HEAD": "get"}
_UNDECLARED = {"HEAD", "OPTIONS"}
"""Flask adds these methods itself. OPTIONS only lists the other methods."""


class ScopeRow(Protocol):
    """See `gateway.http.route.Operation`."""

    @property
    def rule(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def scope(self) -> Demand: ...


class ScopeRule(Protocol):
    """See `werkzeug.routing.Rule`."""

    rule: str
    methods: set[str] | None


class Scopes:
    """The required scopes of all routes. Raises ValueError if a route of `rules` declares none."""

    def __init__(self, rules: Iterable[ScopeRule], rows: Iterable[ScopeRow]) -> None:
        self._demands: Mapping[tuple[str, str], Demand] = {
            (row.rule, row.method): row.scope for row in rows
        }
        undeclared = sorted(
            f"{method} {rule.rule}"
            for rule in rules
            for method in (rule.methods or set()) - _UNDECLARED
            if (rule.rule, method.lower()) not in self._demands
        )
        if undeclared:
            raise ValueError(f"no scope is declared for {', '.join(undeclared)}")

    def demand(self, rule: str, method: str) -> Demand | None:
        """Return the required scope; None: any valid key is enough."""
        return self._demands.get((rule, _IMPLIED.get(method, method.lower())))
