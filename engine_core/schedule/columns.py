"""Columns of a step: a fact of many requests in one list, with one entry per request.

A step of many decoding rows costs the engine mostly calls of functions. So the facts that every
step needs of every row are computed here in one pass over the rows, without a call per row. They
are computed from the requests each time: no fact is stored a second time.

Each function names its reference, which computes the fact for one request.
`tests/property/test_engine_columns.py` checks that they agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from engine_core.request import Request, RequestPhase

RUNNING = RequestPhase.RUNNING


def running_column(requests: Iterable[Request]) -> list[Request]:
    """Return those `requests` that have not ended."""
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
    """Return the first position that no plan has computed, for each request."""
    return [request.num_scheduled for request in requests]


def quiet_tokens(
    requests: Sequence[Request],
    starts: Sequence[int],
    tokens: Sequence[int | None],
    num_decodes: int,
) -> list[int | None]:
    """Return the tokens of the rows that only continue their answer, and None for the other rows.

    Such a row computed one position, and its token neither starts nor ends an answer. No grammar
    and no drafter follows it. So `commit_row`, which is the reference, would append the token and
    count one position, and do nothing else.

    requests, starts   the request of each row, and the first position that the row computed
    tokens             the token of each row that sampled exactly one, and for which the result has
                       nothing else; None for the other rows
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
