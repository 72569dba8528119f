"""Names as a terminal may have them: they come from clients, who may write anything into them."""

from __future__ import annotations

import unicodedata


def clean(text: str) -> str:
    """What of it can be printed, one place each: no control of the terminal, nothing wide."""
    return "".join(char if _is_plain(char) else "?" for char in text)


def _is_plain(char: str) -> bool:
    if not char.isprintable() or unicodedata.combining(char):
        return False
    return unicodedata.east_asian_width(char) not in ("W", "F")


def cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    return text[: max(0, width - 1)] + "…" if width > 0 else ""
