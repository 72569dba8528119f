"""The order of a request's filters as one number, so that a slot stores it as a scalar.

Each filter takes four bits: its place in FILTERS, counted from 1. The first filter is in the lowest
bits. 0 means that the request has no order of its own, or no filter.
"""

from __future__ import annotations

from protocol.engine.sampling import FILTERS, SamplingParams, filter_order

PLACE_BITS = 4
PLACES = len(FILTERS)
"""Most filters of a request: each is listed at most once."""


def packed_order(params: SamplingParams) -> int:
    """Return the packed order of a request's filters."""
    numbers = [FILTERS.index(name) + 1 for name in filter_order(params) or ()]
    return sum(number << (PLACE_BITS * place) for place, number in enumerate(numbers))
