"""Declares the routes of an API: `@routes.post("/v1/...", takes=..., gives=...)` above a view.

One declaration says all about a route: the rule and method that Flask serves, the scope that the
gate requires, and the structs and statuses of the OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from flask import Response as Response

from gateway.auth.gate import RequiredScope

View = Callable[..., Response]
"""Called with the `Service`, the `RequestContext` and the variables of the rule by name."""


class Stream(msgspec.Struct, frozen=True):
    """A stream of server-sent events, each with a `chunk` as its data. `ends_with` is the data of
    the last event, if that is not a chunk."""

    chunk: Any
    ends_with: str = ""


class Parameter(msgspec.Struct, frozen=True):
    name: str
    about: str
    place: Literal["path", "query", "header"] = "query"
    schema: Mapping[str, Any] = msgspec.field(default_factory=lambda: {"type": "string"})


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one route, as the OpenAPI document describes it."""

    method: Literal["get", "post", "delete"]
    #: Flask's rule.
    rule: str
    #: The scope that a key needs; "public": no key is required.
    scope: RequiredScope
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
        """The structs of an error response."""
        return self.error if isinstance(self.error, tuple) else (self.error,)

    @property
    def given(self) -> tuple[Any, ...]:
        """The structs of a 200 response."""
        if self.gives is None:
            return ()
        return self.gives if isinstance(self.gives, tuple) else (self.gives,)


INFERENCE = (400, 404, 405, 413, 415, 429, 500, 503)
"""Statuses of a route that uses the engine, besides 200."""
READING = (404, 405, 500, 503)
"""Statuses of a route without a body, besides 200."""


@dataclass(frozen=True, slots=True)
class Route:
    """A view and its declaration."""

    operation: Operation
    view: View
    #: Called every few seconds by health checks and scrapers: counted, but not logged.
    is_probe: bool = False

    @property
    def endpoint(self) -> str:
        """The name by which Flask knows the route. HEAD and OPTIONS have that of GET."""
        return f"{self.operation.method} {self.operation.rule}"


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of one API, and what they have in common."""

    tag: str
    #: Structs of every error.
    error: type | tuple[type, ...]
    scope: RequiredScope = "inference"
    _routes: list[Route] = field(default_factory=list)

    def get(self, rule: str, **declared: Any) -> Callable[[View], View]:
        return self._route("get", rule, {"statuses": READING, **declared})

    def post(self, rule: str, **declared: Any) -> Callable[[View], View]:
        return self._route("post", rule, {"statuses": INFERENCE, **declared})

    def delete(self, rule: str, **declared: Any) -> Callable[[View], View]:
        return self._route("delete", rule, {"statuses": READING, **declared})

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes)

    def _route(
        self, method: Literal["get", "post", "delete"], rule: str, declared: dict[str, Any]
    ) -> Callable[[View], View]:
        """Return a decorator that adds a view. `declared` has more fields of `Operation`, and
        `is_probe`. They replace what the API's routes have in common."""
        is_probe = declared.pop("is_probe", False)
        common = {"tag": self.tag, "error": self.error, "scope": self.scope}
        operation = Operation(method=method, rule=rule, **(common | declared))

        def add(view: View) -> View:
            self._routes.append(Route(operation, view, is_probe))
            return view

        return add


def json_response(body: Any, status: int = 200) -> Response:
    """Return a JSON response. `body` is encoded already if it is bytes."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Response(data, status=status, content_type="application/json")
