"""What each route asks of its callers: the scope that its row of `operations` declares.

Nothing is open because it was forgotten: a route without a row keeps the server from starting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

from protocol.api_keys import Scope

Demand = Scope | Literal["public"]
"""What a route declares. "public": anybody may have it."""

_IMPLIED = {"HEAD": "get"}
_UNDECLARED = {"HEAD", "OPTIONS"}
"""Flask adds these methods by itself; OPTIONS tells only which others there are."""


class ScopeRow(Protocol):
    """See `openapi.operation.Operation`."""

    @property
    def rule(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def scope(self) -> Demand: ...


class ScopeRule(Protocol):
    """See werkzeug."""

    rule: str
    methods: set[str] | None


class Scopes:
    """The demands of every route. Raises ValueError where a route of `rules` has declared none."""

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
        """None: any key will do."""
        return self._demands.get((rule, _IMPLIED.get(method, method.lower())))
