"""GET /v1/models in Anthropic's shape, for requests with the header `anthropic-version`.

A page has at most `limit` models, after `after_id` and before `before_id`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

import msgspec

from gateway.served_model import ServedModel
from protocol.errors import InvalidRequest

VERSION_HEADER = "anthropic-version"
DEFAULT_LIMIT = 20
MAX_LIMIT = 1000
_NUMBER = re.compile(r"[0-9]{1,4}")


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, tag="model"):
    """A served model.

    display_name       the model's own name; `id` may be an alias set by the operator
    created_at         when the server began to serve it
    max_input_tokens   the context length for prompt and answer together; so is `max_tokens`
    """

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    lifecycle: Literal["active"]


class ModelPage(msgspec.Struct, frozen=True, kw_only=True):
    """first_id, last_id  ids in `data`; null if it is empty"""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_info(served: ServedModel, name: str) -> ModelInfo:
    """Return the model under `name`, one of its served names."""
    since = datetime.fromtimestamp(served.since, UTC)
    return ModelInfo(
        id=name,
        display_name=served.card.name,
        created_at=since.isoformat().replace("+00:00", "Z"),
        max_input_tokens=served.limits.max_len,
        max_tokens=served.limits.max_len,
        lifecycle="active",
    )


def model_page(served: ServedModel, query: Mapping[str, str]) -> ModelPage:
    """Return a page of the served names. Raise InvalidRequest naming a parameter of `query`."""
    limit = _limit(query.get("limit", ""))
    names, is_backward = list(served.names), False
    if after := query.get("after_id"):
        names = names[_place(names, after, "after_id") + 1 :]
    if before := query.get("before_id"):
        names, is_backward = names[: _place(names, before, "before_id")], True
    shown = names[-limit:] if is_backward else names[:limit]
    return ModelPage(
        data=[model_info(served, name) for name in shown],
        has_more=len(shown) < len(names),
        first_id=shown[0] if shown else None,
        last_id=shown[-1] if shown else None,
    )


def _limit(text: str) -> int:
    if not text:
        return DEFAULT_LIMIT
    limit = int(text) if _NUMBER.fullmatch(text) else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidRequest(f"limit: must be a number from 1 to {MAX_LIMIT:,}", param="limit")
    return limit


def _place(names: list[str], name: str, param: str) -> int:
    if name not in names:
        raise InvalidRequest(f"{param}: no model {name!r} is listed", param=param)
    return names.index(name)
