"""Names the fields of a request in its response: the path of a field in an error, and the fields
that had no effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from gateway.http.body import MAX_LISTED_FIELDS
from protocol.wire.errors import InvalidImage, InvalidRequest, RequestError

# ---- errors
#
# An API that is a translation into a chat or a completion gets errors with the paths of that one,
# and the engine's errors have the engine's names. Each path is translated once, in the view.

RequestPath = Callable[[str], str]
"""Maps the path of a field of the chat or completion to its path in the client's request."""
NO_FIELDS: Mapping[str, str] = MappingProxyType({})


def unchanged(path: str) -> str:
    """Return `path`: the client's request is a completion itself."""
    return path


@contextmanager
def translate_errors(
    request_path: RequestPath, engine_fields: Mapping[str, str] = NO_FIELDS
) -> Iterator[None]:
    """Replace the field path in each RequestError that is raised inside the block, in the error's
    `param` and message.

    engine_fields  the engine's names of fields -> paths in the chat or completion. The engine's
                   messages describe these fields in words, so only `param` is replaced
    """
    try:
        yield
    except RequestError as error:
        if (name := error.param) and not isinstance(error, InvalidImage):
            error.param = request_path(engine_fields.get(name, name))
            if name not in engine_fields:
                own, pattern = error.param, rf"(?<![\w.]){re.escape(name)}(?!\w)"
                error.message = re.sub(pattern, lambda _: own, error.message)
        raise error from None


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
