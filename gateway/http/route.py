"""Declarations of routes: a decorator such as `@routes.post("/v1/...", takes=..., gives=...)`.

A route is declared once, above its view. The declaration has the rule and method for Flask, the
scope that the gate requires, and the structs and statuses for the OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from flask import Response as Response

from gateway.auth.gate import RequiredScope

View = Callable[..., Response]
"""A function that handles requests. It is called with the `Service`, the `RequestContext` and, by
name, the variables of the rule."""


class Stream(msgspec.Struct, frozen=True):
    """A stream of server-sent events or of lines, as the OpenAPI document describes it."""

    #: Struct of each event's data or of each line, or a tuple of structs if there are several.
    chunk: Any
    #: The data of the last event, if it is not a chunk; otherwise "".
    ends_with: str = ""
    #: Whether each item is a line of JSON, and no server-sent event.
    is_lines: bool = False

    @property
    def chunks(self) -> tuple[Any, ...]:
        return self.chunk if isinstance(self.chunk, tuple) else (self.chunk,)


class Parameter(msgspec.Struct, frozen=True):
    """A parameter of a route, as the OpenAPI document describes it."""

    name: str
    about: str
    place: Literal["path", "query", "header"] = "query"
    schema: Mapping[str, Any] = msgspec.field(default_factory=lambda: {"type": "string"})


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration of one method of one route."""

    method: Literal["get", "post", "delete"]
    #: The rule of the path, as Flask writes it: "/v1/models/<path:name>".
    rule: str
    #: The scope that a key needs; "public": no key is required.
    scope: RequiredScope
    #: The group of the route in the OpenAPI document.
    tag: str
    #: A summary in one line. Further lines are the description.
    about: str
    #: Media type of the request body.
    takes_type: str = "application/json"
    #: Structs of the request body. If there are several, the body's fields decide which one it is.
    #: Empty: the request has no body.
    takes: tuple[type, ...] = ()
    #: Struct of a response with status 200, or a tuple of structs if it depends on the request.
    #: None: the response is not JSON.
    gives: Any = None
    #: Media types of a response that is not JSON.
    text_types: tuple[str, ...] = ("text/plain",)
    #: The response if it is streamed; None if the route cannot stream.
    streams: Stream | None = None
    #: Struct of every error response, or a tuple of structs if it depends on a header.
    error: type | tuple[type, ...]
    #: Statuses of error responses. The document adds 400 and 403, and 401 if a key is required.
    statuses: tuple[int, ...] = ()
    #: Status besides 200 whose response is not an error -> struct of that response.
    otherwise: dict[int, type] = {}
    parameters: tuple[Parameter, ...] = ()

    @property
    def errors(self) -> tuple[type, ...]:
        """The structs that an error response may have."""
        return self.error if isinstance(self.error, tuple) else (self.error,)

    @property
    def given(self) -> tuple[Any, ...]:
        """The structs that a response with status 200 may have."""
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
    #: Whether the route is called by health checks or scrapers every few seconds. Its requests are
    #: counted, but not logged.
    is_probe: bool = False

    @property
    def endpoint(self) -> str:
        """The route's name in Flask. Flask uses the name of GET for HEAD and OPTIONS too."""
        return f"{self.operation.method} {self.operation.rule}"


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of one API, and the fields that their declarations have in common."""

    tag: str
    #: Struct of every error response, or a tuple of structs if it depends on a header.
    error: type | tuple[type, ...]
    #: The scope of all routes. None: each of them declares its own, so that none is open to all
    #: callers by default.
    scope: RequiredScope | None = None
    _routes: list[Route] = field(default_factory=list)

    def get(self, rule: str, **declared: Any) -> Callable[[View], View]:
        """Return a decorator that adds a view for GET. `declared` are fields of `Operation`."""
        return self._route("get", rule, {"statuses": READING, **declared})

    def post(self, rule: str, **declared: Any) -> Callable[[View], View]:
        """Return a decorator that adds a view for POST. `declared` are fields of `Operation`."""
        return self._route("post", rule, {"statuses": INFERENCE, **declared})

    def delete(self, rule: str, **declared: Any) -> Callable[[View], View]:
        """Return a decorator that adds a view for DELETE. `declared` are fields of `Operation`."""
        return self._route("delete", rule, {"statuses": READING, **declared})

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes)

    def _route(
        self, method: Literal["get", "post", "delete"], rule: str, declared: dict[str, Any]
    ) -> Callable[[View], View]:
        """Return a decorator that adds a view. Raises TypeError if the route has no scope.

        declared  fields of `Operation`, and perhaps `is_probe`; they override the fields that the
                  routes of this API have in common
        """
        is_probe = declared.pop("is_probe", False)
        common = {"tag": self.tag, "error": self.error}
        if self.scope is not None:
            common["scope"] = self.scope
        operation = Operation(method=method, rule=rule, **(common | declared))

        def add(view: View) -> View:
            self._routes.append(Route(operation, view, is_probe))
            return view

        return add


def json_response(body: Any, status: int = 200) -> Response:
    """Return a JSON response. If `body` is bytes, it is JSON already."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Response(data, status=status, content_type="application/json")
