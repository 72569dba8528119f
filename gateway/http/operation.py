"""What a route takes and gives, for its documentation: a row of an API's `operations.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from gateway.auth.scopes import Demand


class Stream(msgspec.Struct, frozen=True):
    """Server-sent events. `chunk` is what the data of one is; `ends_with` what the last one says,
    where that is no such chunk."""

    chunk: Any
    ends_with: str = ""


class Parameter(msgspec.Struct, frozen=True):
    name: str
    about: str
    place: Literal["path", "query", "header"] = "query"
    schema: Mapping[str, Any] = msgspec.field(default_factory=lambda: {"type": "string"})


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """rule       as Flask has it
    scope      that a key needs for it; "public": anybody may have it
    about      one line for lists, then what else there is to know
    takes      the struct of the body; several where the body's fields decide; none: no body
    gives      the struct of a 200; several where the body's fields decide; None: text
    streams    what a streamed answer is made of
    error      the struct of every other answer; several where a header decides
    statuses   that it answers with, beside 200
    otherwise  statuses that are answered with something else than an error
    """

    method: Literal["get", "post", "delete"]
    rule: str
    scope: Demand
    tag: str
    about: str
    takes: tuple[type, ...] = ()
    gives: Any = None
    streams: Stream | None = None
    error: type | tuple[type, ...]
    statuses: tuple[int, ...] = ()
    otherwise: dict[int, type] = {}
    parameters: tuple[Parameter, ...] = ()

    @property
    def errors(self) -> tuple[type, ...]:
        """All that any other answer may be."""
        return self.error if isinstance(self.error, tuple) else (self.error,)

    @property
    def given(self) -> tuple[Any, ...]:
        """All that a 200 may be."""
        if self.gives is None:
            return ()
        return self.gives if isinstance(self.gives, tuple) else (self.gives,)


INFERENCE = (400, 404, 405, 413, 415, 429, 500, 503)
"""What a route that asks the engine may answer, beside 200."""
READING = (404, 405, 500, 503)
"""What a route without a body may."""
