"""Makes untrusted names, which come from clients, safe to print on a terminal."""

from __future__ import annotations

import unicodedata


def clean(text: str) -> str:
    """Replace control, combining and wide characters with "?", so each character has width 1."""
    return "".join(char if _is_plain(char) else "?" for char in text)


def _is_plain(char: str) -> bool:
    if not char.isprintable() or unicodedata.combining(char):
        return False
    return unicodedata.east_asian_width(char) not in ("W", "F")


def cut(text: str, width: int) -> str:
    """Shorten `text` to `width` characters, with an ellipsis if it was longer."""
    if len(text) <= width:
        return text
    return text[: max(0, width - 1)] + "…" if width > 0 else ""
