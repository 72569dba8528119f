"""The gateway's application without garbage collection, and with a route that counts its objects.

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

from gateway.app import create_app

OBJECTS = "/_objects"
"""Path of the route that returns the number of objects of each type in the process."""


def create_counted_app() -> flask.Flask:
    """Return the application. Garbage collection is off in the process that calls this."""
    app = create_app()
    answer = app.wsgi_app

    def wsgi_app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != OBJECTS:
            return answer(environ, start_response)
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(num_objects()).encode()]

    app.wsgi_app = wsgi_app  # type: ignore[method-assign]
    gc.disable()
    return app


def num_objects() -> dict[str, int]:
    """Return type -> number of its objects, for all objects that the collector tracks."""
    kinds = map(type, gc.get_objects())
    return Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
