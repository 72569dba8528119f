"""Renames the fields in an error about a chat to those of the request it was translated from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from protocol.errors import RequestError

OwnName = Callable[[str], str]
"""Maps the path of a chat field to its path in the client's request."""


@contextmanager
def named(own_name: OwnName) -> Iterator[None]:
    """Rename the fields of each RequestError raised inside the block."""
    try:
        yield
    except RequestError as error:
        raise renamed(error, own_name) from None


def renamed(error: RequestError, own_name: OwnName) -> RequestError:
    """Replace the field path in the error's `param` and message."""
    if error.param:
        own = own_name(error.param)
        there = rf"(?<![\w.]){re.escape(error.param)}(?!\w)"
        error.message = re.sub(there, lambda _: own, error.message)
        error.param = own
    return error
