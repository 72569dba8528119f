"""Reading on with a pattern."""

from __future__ import annotations

import re


def past(pattern: re.Pattern[str], text: str, position: int = 0) -> int:
    """Where `pattern`, which matches everywhere, if only nothing, ends that begins at
    `position`."""
    return pattern.match(text, position).end()  # type: ignore[union-attr]  # see above
