"""truncation "auto": the oldest items are left out until the rest fits the model's context.

What the system and the developer say stays, and so does the last item. A conversation is cut before
something its user says, where that is enough; else before any item. The output of a call that is
left out is left out, too. Each try renders the conversation, so the place is found by halving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from gateway.api.responses.items import PlacedItem
from gateway.api.responses.messages import SYSTEM_ROLES
from protocol.errors import ContextTooLong

ROOM_TOKENS = 256
"""Left for an answer whose length is not said."""
T = TypeVar("T")


def room_for(max_output_tokens: int | None, max_len: int) -> int:
    """The tokens that a prompt has to leave."""
    return min(max_output_tokens or ROOM_TOKENS, max_len // 2)


def fitted(
    items: Sequence[PlacedItem],
    render: Callable[[Sequence[PlacedItem]], T],
    fits: Callable[[T], bool],
) -> T:
    """What `render` makes of as many of the latest items as fit. `render` may also raise
    ContextTooLong, which leaves this where not even the fewest fit."""

    def attempt(items: Sequence[PlacedItem]) -> T | None:
        try:
            rendered = render(items)
        except ContextTooLong:
            return None
        return rendered if fits(rendered) else None

    if (whole := attempt(items)) is not None:
        return whole
    cuts = cuts_of(items)
    low, high = 0, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        if attempt(behind(items, cuts[middle])) is not None:
            high = middle
        else:
            low = middle + 1
    return render(behind(items, cuts[low]) if cuts else items)


def cuts_of(items: Sequence[PlacedItem]) -> list[int]:
    """Places before which a conversation may be cut, the first that leave most."""
    said = [i for i, placed in enumerate(items) if _role(placed) == "user" and i]
    last = said[-1] if said else 0
    rest = range(last + 1, len(items))
    return said + [i for i in rest if items[i].item["type"] != "function_call_output"]


def behind(items: Sequence[PlacedItem], cut: int) -> list[PlacedItem]:
    called = {placed.item.get("call_id") for placed in items[cut:] if _is(placed, "function_call")}
    return [
        placed
        for i, placed in enumerate(items)
        if _role(placed) in SYSTEM_ROLES
        or (
            i >= cut
            and not (
                _is(placed, "function_call_output") and placed.item.get("call_id") not in called
            )
        )
    ]


def _role(placed: PlacedItem) -> str | None:
    return placed.item.get("role")


def _is(placed: PlacedItem, kind: str) -> bool:
    return bool(placed.item["type"] == kind)
