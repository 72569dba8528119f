"""The documentation of one route: a row of an API's `operations.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from gateway.auth.scopes import Demand


class Stream(msgspec.Struct, frozen=True):
    """A stream of server-sent events, each with a `chunk` as its data. If the last event has other
    data, that is `ends_with`."""

    chunk: Any
    ends_with: str = ""


class Parameter(msgspec.Struct, frozen=True):
    name: str
    about: str
    place: Literal["path", "query", "header"] = "query"
    schema: Mapping[str, Any] = msgspec.field(default_factory=lambda: {"type": "string"})


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one route."""

    method: Literal["get", "post", "delete"]
    #: Flask's rule.
    rule: str
    #: The scope that a key needs; "public": no key is required.
    scope: Demand
    tag: str
    #: The summary in one line, then an optional description.
    about: str
    #: Structs of the body, several if its fields decide; empty: no body.
    takes: tuple[type, ...] = ()
    #: Struct of a 200, a tuple if the body's fields decide; None: text.
    gives: Any = None
    #: The streamed response, if there is one.
    streams: Stream | None = None
    #: Struct of every error, a tuple if a header decides.
    error: type | tuple[type, ...]
    #: Statuses besides 200.
    statuses: tuple[int, ...] = ()
    #: Statuses whose body is not an error.
    otherwise: dict[int, type] = {}
    parameters: tuple[Parameter, ...] = ()

    @property
    def errors(self) -> tuple[type, ...]:
        """The structs of an error."""
        return self.error if isinstance(self.error, tuple) else (self.error,)

    @property
    def given(self) -> tuple[Any, ...]:
        """The structs of a 200."""
        if self.gives is None:
            return ()
        return self.gives if isinstance(self.gives, tuple) else (self.gives,)


INFERENCE = (400, 404, 405, 413, 415, 429, 500, 503)
"""Statuses of a route that uses the engine, besides 200."""
READING = (404, 405, 500, 503)
"""Statuses of a route without a body, besides 200."""
