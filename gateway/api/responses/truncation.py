"""Truncation "auto": drops the oldest items until the rest fits the model's context.

System messages, developer messages and the last item stay. The conversation is cut before a user
message if that suffices, else before another item. If a call is dropped, its output is dropped too.
Each attempt renders the conversation. To save attempts, the cut is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from gateway.api.responses.items import SYSTEM_ROLES, PlacedItem
from protocol.errors import ContextTooLong

ROOM_TOKENS = 256
"""Tokens reserved for the answer if the request does not limit it."""
T = TypeVar("T")


def reserved_tokens(max_output_tokens: int | None, max_len: int) -> int:
    """Return the number of tokens to reserve for the answer: at most half of the context."""
    return min(max_output_tokens or ROOM_TOKENS, max_len // 2)


def render_fitting(
    items: Sequence[PlacedItem],
    render: Callable[[Sequence[PlacedItem]], T],
    fits: Callable[[T], bool],
) -> T:
    """Return the rendering of as many of the latest items as fit.

    If even the fewest items do not fit, return the rendering of these, or raise the ContextTooLong
    of `render`.
    """

    def attempt(items: Sequence[PlacedItem]) -> T | None:
        try:
            rendered = render(items)
        except ContextTooLong:
            return None
        return rendered if fits(rendered) else None

    if (whole := attempt(items)) is not None:
        return whole
    cuts = possible_cuts(items)
    low, high = 0, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        if attempt(items_after(items, cuts[middle])) is not None:
            high = middle
        else:
            low = middle + 1
    return render(items_after(items, cuts[low]) if cuts else items)


def possible_cuts(items: Sequence[PlacedItem]) -> list[int]:
    """Return the indexes of the items before which the conversation may be cut. The preferred ones
    are first."""
    user_turns = [i for i, placed in enumerate(items) if _role(placed) == "user" and i]
    last = user_turns[-1] if user_turns else 0
    rest = range(last + 1, len(items))
    return user_turns + [i for i in rest if items[i].item["type"] != "function_call_output"]


def items_after(items: Sequence[PlacedItem], cut: int) -> list[PlacedItem]:
    """Return the items from index `cut` on, and the system messages before `cut`. Outputs of
    dropped calls are dropped."""
    calls = {placed.item["call_id"] for placed in items[cut:] if _is(placed, "function_call")}

    def stays(place: int, placed: PlacedItem) -> bool:
        if place < cut or _role(placed) in SYSTEM_ROLES:
            return _role(placed) in SYSTEM_ROLES
        return not _is(placed, "function_call_output") or placed.item["call_id"] in calls

    return [placed for place, placed in enumerate(items) if stays(place, placed)]


def _role(placed: PlacedItem) -> str | None:
    return placed.item.get("role")


def _is(placed: PlacedItem, kind: str) -> bool:
    return bool(placed.item["type"] == kind)
