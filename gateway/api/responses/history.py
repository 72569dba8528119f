"""The stored items that a request continues: previous responses and referenced items.

All of these items become part of the prompt: messages, reasoning, calls and their outputs. So the
prompt is the same as if the client had sent the items again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.api.responses.items import PREVIOUS, Item, PlacedItem, input_items, response_of
from gateway.api.responses.requests import ResponsesBody
from gateway.store.database import BrokenChain, Database
from gateway.store.queries import StoredRecord
from gateway.store.sqlite_file import Store
from protocol.wire.errors import InvalidRequest

UNFINISHED = ("queued", "in_progress")
"""Statuses of a response that is still being generated."""


class History:
    """The stored responses of one owner. `store` is None if the server stores nothing."""

    def __init__(self, store: Store[Database] | None, owner: str) -> None:
        self._store = store
        self._owner = owner

    def read_items(self, body: ResponsesBody) -> tuple[list[PlacedItem], list[PlacedItem]]:
        """Return (the request's own items, all items before them). Raise InvalidRequest if an item
        is invalid or a stored one is missing."""
        own = self.resolve_references(input_items(body.input))
        previous = body.previous_response_id
        return own, self.items_before(previous) if previous is not None else []

    def items_before(self, response_id: str) -> list[PlacedItem]:
        """Return the items of a stored response and of those that it continues. Raise
        InvalidRequest if one of them is not stored, or if the response is not complete yet."""
        if self._store is None:
            raise InvalidRequest.at(
                PREVIOUS, "this server stores no responses (see --response-store)"
            )
        try:
            records = self._store.call(
                lambda database: database.chain(response_id, self._owner, time.time())
            )
        except BrokenChain as broken:
            if broken.missing == response_id:
                raise InvalidRequest.at(
                    PREVIOUS, f"no response {response_id!r} is stored"
                ) from None
            raise InvalidRequest.at(
                PREVIOUS, f"{response_id!r} continues {broken.missing!r}, which is no longer stored"
            ) from None
        if body_of(records[-1])["status"] in UNFINISHED:
            raise InvalidRequest.at(PREVIOUS, f"{response_id!r} is not complete yet")
        return [PlacedItem(item, PREVIOUS) for record in records for item in all_items(record)]

    def resolve_references(self, items: Sequence[PlacedItem]) -> list[PlacedItem]:
        """Return the items with each reference replaced by the stored item. Raise InvalidRequest if
        an item is missing."""
        return [
            PlacedItem(self._referenced_item(placed), placed.at)
            if placed.item["type"] == "item_reference"
            else placed
            for placed in items
        ]

    def _referenced_item(self, placed: PlacedItem) -> Item:
        name = placed.item["id"]
        response_id = response_of(name)
        if self._store is not None and response_id is not None:
            record = self._store.call(
                lambda database: database.get(response_id, self._owner, time.time())
            )
            for item in all_items(record) if record else ():
                if item.get("id") == name:
                    return item
        raise InvalidRequest.at(f"{placed.at}.id", f"no item {name!r} is stored")


def body_of(record: StoredRecord) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.json.decode(record.body)
    return body


def input_of(record: StoredRecord) -> list[Item]:
    items: list[Item] = msgspec.json.decode(record.input)
    return items


def all_items(record: StoredRecord) -> list[Item]:
    """Return the input items and output items of a stored response."""
    return [*input_of(record), *body_of(record)["output"]]
