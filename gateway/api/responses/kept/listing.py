"""Pages of items, in the shape of OpenAI's lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.api.responses.items import Item
from protocol.errors import InvalidRequest


def page_of(items: Sequence[Item], limit: int, after: str | None) -> dict[str, Any]:
    """Return at most `limit` items, starting after the one with the id `after`."""
    ids = [item["id"] for item in items]
    start = 0
    if after is not None:
        if after not in ids:
            raise InvalidRequest(f"after: no item {after!r} is listed", param="after")
        start = ids.index(after) + 1
    page = list(items[start : start + limit])
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }
