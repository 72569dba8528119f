"""The ids of requests, and the shorter forms in which people enter them.

The id of an answer is the id of its request after the prefix of its API: the request
`7f3a9c04...` has the answer `chatcmpl-7f3a9c04...`. The log has the former.
"""

from __future__ import annotations

from collections.abc import Iterable

PREFIXES = (
    "chatcmpl-",
    "cmpl-",
    "completion-",
    "embd-",
    "generate-tokens-",
    "infill-",
    "msg_",
    "ollama-",
    "pool-",
    "rerank-",
    "resp_",
    "score-",
)
"""The prefixes of all APIs. A client's own id, such as `hello-1`, has none of them."""
MIN_BEGINNING_CHARS = 4
"""The fewest characters of an id, without its prefix, that may stand for the whole id."""


def bare_id(text: str) -> str:
    """Return an id without the prefix of its API."""
    prefix = next(filter(text.startswith, PREFIXES), "")
    return text.removeprefix(prefix)


def matches(known: str, text: str) -> bool:
    """Return whether `text` is the id `known`, with or without a prefix of an API."""
    return text == known or bare_id(text) == bare_id(known)


def begins(known: str, text: str) -> bool:
    """Return whether the id `known` begins with `text`, which may end with an ellipsis. Texts that
    are too short begin no id. A prefix of an API needs no equal in `known`."""
    start = text.removesuffix("…")
    if len(bare_id(start)) < MIN_BEGINNING_CHARS:
        return False
    return known.startswith(start) or bare_id(known).startswith(bare_id(start))


def several(text: str, ids: Iterable[str]) -> str:
    """Return the message that `text` may stand for each of these ids."""
    listed = list(ids)
    return f"{len(listed)} requests have an id like {text}: {', '.join(listed)}; give more of it"


def choose(known: Iterable[str], text: str) -> list[str]:
    """Return the ids that `text` may stand for: equal ones, or else those that begin with it."""
    ids = list(dict.fromkeys(known))
    return [each for each in ids if matches(each, text)] or [
        each for each in ids if begins(each, text)
    ]
