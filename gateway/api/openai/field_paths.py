"""Names the fields of a request in its response: the path of a field in an error, and the fields
that had no effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from gateway.http.body import MAX_LISTED_FIELDS
from protocol.wire.errors import InvalidRequest, RequestError

# ---- errors about a chat that was translated from another API's request

RequestPath = Callable[[str], str]
"""Maps the path of a chat field to its path in the client's request."""


@contextmanager
def translate_errors(request_path: RequestPath) -> Iterator[None]:
    """Replace the field path in each RequestError that is raised inside the block."""
    try:
        yield
    except RequestError as error:
        raise translate_error(error, request_path) from None


def translate_error(error: RequestError, request_path: RequestPath) -> RequestError:
    """Replace the field path in the error's `param` and message. Return the error."""
    if error.param:
        path = request_path(error.param)
        pattern = rf"(?<![\w.]){re.escape(error.param)}(?!\w)"
        error.message = re.sub(pattern, lambda _: path, error.message)
        error.param = path
    return error


# ---- fields without effect


def ignored_fields(ignored: Iterable[str], strict_params: bool | None) -> list[str]:
    """Return the first MAX_LISTED_FIELDS distinct fields of `ignored`, for `ignored_params`. Raise
    InvalidRequest if there are any and `strict_params` is true."""
    fields = list(dict.fromkeys(ignored))[:MAX_LISTED_FIELDS]
    if fields and strict_params:
        raise InvalidRequest.at(
            fields[0],
            f"without effect here, and strict_params is true; fields without effect: "
            f"{', '.join(fields)}",
        )
    return fields
