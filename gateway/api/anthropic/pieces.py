"""Accessors for untyped JSON. They raise InvalidRequest naming the path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protocol.errors import InvalidRequest


def members_of(value: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{at}: must be an object", param=at)
    return value


def text_in(value: Mapping[str, Any], name: str, at: str) -> str:
    text = value.get(name)
    if not isinstance(text, str):
        raise InvalidRequest(f"{at}.{name}: must be a string", param=f"{at}.{name}")
    return text


def optional_text(value: Mapping[str, Any], name: str, at: str) -> str:
    return "" if value.get(name) is None else text_in(value, name, at)


def blocks_of(content: Any, at: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the blocks as (path, block). A string is one text block."""
    if isinstance(content, str):
        return [(at, {"type": "text", "text": content})]
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{at}: must be a string or a list of blocks", param=at)
    places = [f"{at}[{i}]" for i in range(len(content))]
    return [(at, members_of(block, at)) for at, block in zip(places, content, strict=True)]


def text_of_block(block: Mapping[str, Any], at: str) -> str:
    """Return the text of a text block."""
    text = block.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{at}.text: must be a string", param=f"{at}.text")
    return text


def unexpected(kind: Any, at: str, known: Sequence[str]) -> InvalidRequest:
    return InvalidRequest(
        f"{at}.type: must be one of {', '.join(known)}; got {kind!r}", param=f"{at}.type"
    )
