"""Messages of 404 and 405 errors, with the routes that resemble the requested one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from gateway.auth.scopes import ScopeRule
from gateway.auth.target import MAX_TOLD_LETTERS, printable

_VARIABLE = re.compile(r"<(?:\w+:)?(\w+)>")
_UNTOLD = {"HEAD", "OPTIONS"}
MAX_NEAR = 3
LEAST_LIKENESS = 0.6
"""The least similarity of two paths, as `difflib` measures it; 1 is equality."""
_ALL = "GET /openapi.json lists all routes"


class NearRoutes:
    """The routes of an application, as `METHOD /path/{variable}`."""

    def __init__(self, rules: Iterable[ScopeRule]) -> None:
        methods: dict[str, set[str]] = {}
        for rule in rules:
            path = _VARIABLE.sub(r"{\1}", rule.rule)
            methods.setdefault(path, set()).update((rule.methods or set()) - _UNTOLD)
        self._methods: Mapping[str, list[str]] = {
            path: sorted(found) for path, found in methods.items()
        }

    def not_found(self, method: str, path: str) -> str:
        """The message of a 404."""
        asked = path[:MAX_TOLD_LETTERS].rstrip("/").lower()
        near = get_close_matches(asked, self._methods, MAX_NEAR, LEAST_LIKENESS)
        message = f"there is no route {method} {printable(path)}"
        if not near:
            return f"{message}; {_ALL}"
        told = (f"{known} {path}" for path in near for known in self._methods[path])
        return f"{message}; similar routes: {', '.join(told)}; {_ALL}"

    def not_allowed(self, method: str, path: str, allowed: Iterable[str]) -> str:
        """The message of a 405."""
        told = ", ".join(sorted(set(allowed) - _UNTOLD))
        return f"{method} is not allowed on {printable(path)}; allowed: {told}"
