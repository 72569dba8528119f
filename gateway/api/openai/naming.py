"""Renames the fields in an error about a chat to those of the request it was translated from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from protocol.errors import RequestError

RequestPath = Callable[[str], str]
"""Maps the path of a chat field to its path in the client's request."""


@contextmanager
def renaming(request_path: RequestPath) -> Iterator[None]:
    """Rename the fields of each RequestError raised inside the block."""
    try:
        yield
    except RequestError as error:
        raise rename_error(error, request_path) from None


def rename_error(error: RequestError, request_path: RequestPath) -> RequestError:
    """Replace the field path in the error's `param` and message."""
    if error.param:
        path = request_path(error.param)
        pattern = rf"(?<![\w.]){re.escape(error.param)}(?!\w)"
        error.message = re.sub(pattern, lambda _: path, error.message)
        error.param = path
    return error
