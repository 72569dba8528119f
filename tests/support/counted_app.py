"""The gateway's application without garbage collection, and with routes that count its memory.

gunicorn serves it in place of `gateway.app:create_app()`. Objects that only a reference cycle keeps
are never collected, so they are counted, too.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import flask

from gateway.app import EXTENSION, create_app

OBJECTS, BODY_BYTES = "/_objects", "/_body_bytes"
"""Paths of the routes that return the number of objects of each type in the process, and the number
of bytes that large bodies have reserved."""


def create_counted_app() -> flask.Flask:
    """Return the application. Garbage collection is off in the process that calls this."""
    app = create_app()
    answer = app.wsgi_app
    memory = app.extensions[EXTENSION].bodies.memory
    counts: dict[str, Callable[[], object]] = {
        OBJECTS: num_objects,
        BODY_BYTES: lambda: memory.num_held,
    }

    def wsgi_app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        count = counts.get(environ["PATH_INFO"])
        if count is None:
            return answer(environ, start_response)
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(count()).encode()]

    app.wsgi_app = wsgi_app  # type: ignore[method-assign]
    gc.disable()
    return app


def num_objects() -> dict[str, int]:
    """Return type -> number of its objects, for all objects that the collector tracks."""
    kinds = map(type, gc.get_objects())
    return Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
