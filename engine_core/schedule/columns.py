"""Columns of a step: a fact of many requests in one list, with one entry per request.

In a step with many decoding rows, most of the engine's time is spent on function calls. So the
facts that every step needs about every row are computed here in one pass over the rows, without a
call per row. They are computed from the requests each time, so no fact is stored twice.

Each function names its reference, which computes the fact for one request.
`tests/property/test_engine_columns.py` checks that they agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from engine_core.requests.request import Request, RequestPhase

RUNNING = RequestPhase.RUNNING


def running_column(requests: Iterable[Request]) -> list[Request]:
    """Return those `requests` that are in phase RUNNING."""
    return [request for request in requests if request.phase is RUNNING]


def uncomputed_column(requests: Iterable[Request]) -> list[int]:
    """Return `Request.num_uncomputed` of each request."""
    return [
        0
        if (ahead := len(request.tokens) + request.num_pending) >= request.max_total_tokens
        and request.num_pending
        else ahead - request.num_scheduled
        for request in requests
    ]


def samples_column(requests: Iterable[Request]) -> list[bool]:
    """Return `Request.samples` of each request."""
    return [request.max_total_tokens > request.prompt_tokens for request in requests]


def slot_column(requests: Iterable[Request]) -> list[int]:
    """Return the slot of each request. Every request must own one."""
    return cast(list[int], [request.slot for request in requests])


def start_column(requests: Iterable[Request]) -> list[int]:
    """Return `num_scheduled` of each request: the first position that is in no plan yet."""
    return [request.num_scheduled for request in requests]


def quiet_tokens(
    requests: Sequence[Request],
    starts: Sequence[int],
    tokens: Sequence[int | None],
    num_decodes: int,
) -> list[int | None]:
    """Return the token of each row that only continues its answer, and None for each other row.

    Such a row computed one position, and its token neither starts nor ends an answer. Its request
    has no grammar and no drafter. So `commit_row`, which is the reference, would append the token
    and count one position, and do nothing else.

    requests, starts   the request of each row, and the first position that the row computed
    tokens             the token of each row whose result is exactly one token; None for the other
                       rows
    num_decodes        number of rows that computed one position, without drafts; they come first
    """
    rows = zip(requests[:num_decodes], starts, tokens, strict=False)
    quiet = [
        token
        if token is not None
        and request.phase is RUNNING
        and request.matcher is None
        and request.drafting is None
        and request.prompt_tokens <= start < request.max_total_tokens - 2
        and token not in request.stop_ids
        else None
        for request, start, token in rows
    ]
    quiet += [None] * (len(requests) - num_decodes)
    return quiet
