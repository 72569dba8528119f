"""Converts blocks to text: text, text documents and search results.

Other blocks are refused in a user's turn. In a tool result, which the user cannot change, they are
replaced by a line that names the missing block, and the response has a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gateway.api.anthropic.pieces import (
    blocks_of,
    members_of,
    optional_text,
    text_in,
    text_of_block,
    unexpected,
)
from protocol.errors import InvalidRequest

Block = Mapping[str, Any]


def readable(block: Block, at: str) -> str:
    """Return a block's text. Raise InvalidRequest if it has none."""
    kind = block.get("type")
    convert = _CONVERTERS.get(kind) if isinstance(kind, str) else None
    if convert is not None:
        return convert(block, at)
    if kind == "image":
        raise _not_text(f"{at}.type", kind)
    raise unexpected(kind, at, tuple(_CONVERTERS))


def result_text(block: Block, at: str) -> tuple[str, str | None]:
    """Return the text of a block in a tool result, and its type if it was left out."""
    kind = block.get("type")
    if not isinstance(kind, str):
        raise unexpected(kind, at, tuple(_CONVERTERS))
    is_readable = kind in _CONVERTERS and (
        kind != "document"
        or members_of(block.get("source"), f"{at}.source").get("type") in _TEXT_SOURCES
    )
    if is_readable:
        return readable(block, at), None
    return f"[{kind} left out: this model reads text only]", kind


def _document(block: Block, at: str) -> str:
    at_source = f"{at}.source"
    source = members_of(block.get("source"), at_source)
    match source.get("type"):
        case "text":
            text = text_in(source, "data", at_source)
        case "content":
            text = _texts(source.get("content"), f"{at_source}.content")
        case kind:
            raise _not_text(f"{at_source}.type", kind)
    return _titled(block, at, ("title", "context"), text)


def _search_result(block: Block, at: str) -> str:
    return _titled(block, at, ("title", "source"), _texts(block.get("content"), f"{at}.content"))


def _texts(content: Any, at: str) -> str:
    texts = []
    for place, block in blocks_of(content, at):
        if block.get("type") != "text":
            raise _not_text(f"{place}.type", block.get("type"))
        texts.append(text_of_block(block, place))
    return "\n".join(texts)


def _titled(block: Block, at: str, names: tuple[str, ...], text: str) -> str:
    """Return `text` preceded by one line per member of `names` that the block has."""
    known = [(name, optional_text(block, name, at)) for name in names]
    head = "".join(f"{name}: {value}\n" for name, value in known if value)
    return f"{head}\n{text}" if head else text


def _not_text(at: str, kind: Any) -> InvalidRequest:
    return InvalidRequest(f"{at}: this model reads text only; got {kind!r}", param=at)


_CONVERTERS: Mapping[str, Callable[[Block, str], str]] = {
    "text": text_of_block,
    "document": _document,
    "search_result": _search_result,
}
_TEXT_SOURCES = ("text", "content")
"""Types of a document's source that are text."""
