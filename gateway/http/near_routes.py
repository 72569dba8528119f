"""Messages of 404 and 405 errors, with routes that resemble the requested one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from gateway.auth.scopes import ScopeRule
from gateway.auth.target import MAX_SHOWN_CHARS, printable

_VARIABLE = re.compile(r"<(?:\w+:)?(\w+)>")
_NOT_LISTED = {"HEAD", "OPTIONS"}
MAX_NEAR = 3
MIN_SIMILARITY = 0.6
"""Minimum similarity of two paths, as `difflib` measures it; 1 is equality."""
_ALL = "GET /openapi.json lists all routes"


class NearRoutes:
    """Builds the messages of 404 and 405 errors. A 404 lists similar routes of the application, as
    `METHOD /path/{variable}`."""

    def __init__(self, rules: Iterable[ScopeRule]) -> None:
        methods: dict[str, set[str]] = {}
        for rule in rules:
            path = _VARIABLE.sub(r"{\1}", rule.rule)
            methods.setdefault(path, set()).update((rule.methods or set()) - _NOT_LISTED)
        self._methods: Mapping[str, list[str]] = {
            path: sorted(found) for path, found in methods.items()
        }

    def not_found(self, method: str, path: str) -> str:
        """Return the message of a 404."""
        requested = path[:MAX_SHOWN_CHARS].rstrip("/").lower()
        near = get_close_matches(requested, self._methods, MAX_NEAR, MIN_SIMILARITY)
        message = f"there is no route {method} {printable(path)}"
        if not near:
            return f"{message}; {_ALL}"
        routes = (f"{known} {path}" for path in near for known in self._methods[path])
        return f"{message}; similar routes: {', '.join(routes)}; {_ALL}"

    def not_allowed(self, method: str, path: str, allowed: Iterable[str]) -> str:
        """Return the message of a 405."""
        methods = ", ".join(sorted(set(allowed) - _NOT_LISTED))
        return f"{method} is not allowed on {printable(path)}; allowed: {methods}"
