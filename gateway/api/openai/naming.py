"""Errors about a chat, told in the words of the request that the chat was made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from protocol.errors import RequestError

OwnName = Callable[[str], str]
"""A field of the chat -> the same in the client's request."""


@contextmanager
def named(own_name: OwnName) -> Iterator[None]:
    """Errors raised inside leave with the names of the request."""
    try:
        yield
    except RequestError as error:
        raise renamed(error, own_name) from None


def renamed(error: RequestError, own_name: OwnName) -> RequestError:
    """Both where the error names its field and where its message does."""
    if error.param:
        own = own_name(error.param)
        there = rf"(?<![\w.]){re.escape(error.param)}(?!\w)"
        error.message = re.sub(there, lambda _: own, error.message)
        error.param = own
    return error
