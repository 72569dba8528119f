"""Markers with a suffix that only the checkpoint's vocabulary knows: `<tool_call:6124c78e>`.

Such a checkpoint has the suffix in most of its markers; those that its vocabulary has without it
alone are written without.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

SUFFIXED = re.compile(r"<(?:tool_calls?|think)(:[^\s<>]+)>")


def suffix_in(vocabulary: Iterable[str]) -> str:
    """The suffix of a vocabulary's markers, its colon included; "" where they have none."""
    return next((found[1] for token in vocabulary if (found := SUFFIXED.fullmatch(token))), "")


def spelt_in(text: str) -> list[str]:
    """The markers with a suffix that a text (a chat template) writes."""
    return [found[0] for found in SUFFIXED.finditer(text)]


def suffixed(marker: str, vocabulary: Collection[str]) -> str:
    """`marker`, which ends with ">", as a checkpoint with this vocabulary writes it."""
    longer = marker.removesuffix(">") + suffix_in(vocabulary) + ">"
    return marker if marker in vocabulary and longer not in vocabulary else longer
