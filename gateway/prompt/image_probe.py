"""Finds how a chat template writes images, by rendering tiny conversations with and without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import msgspec

from gateway.prompt.content import ChatTurn, TurnCall
from gateway.prompt.traits import TemplateTraits

IMAGE_MARK = "n33dleimagex"
"""The text that stands for an image in these conversations."""
_TEXT = "n33dlebesidex"
_ASK = ChatTurn("user", ["n33dleaskx"])
_CALL = ChatTurn(
    "assistant", calls=[TurnCall("n33dletool0x", {"n33dlearg0x": "1"}, id="callid000")]
)

Tools = Sequence[Mapping[str, Any]]
Output = Callable[[Sequence[ChatTurn], Tools, TemplateTraits], str]
"""Returns a template's output, or "" if the template cannot render the turns."""


def with_images(traits: TemplateTraits, output: Output, tools: Tools) -> TemplateTraits:
    """Return the traits with what the template writes for an image in a user message, and with the
    roles in whose messages it writes the same."""
    scenes: dict[str, tuple[Sequence[ChatTurn], Sequence[ChatTurn], Tools]] = {
        "user": ((), (), ()),
        "system": ((), (_ASK,), ()),
        "tool": ((_ASK, _CALL), (), tools),
    }
    for role, (before, after, used) in scenes.items():
        turn = ChatTurn(role, [_TEXT], call_id="callid000" if role == "tool" else None)
        pictured = replace(turn, texts=[IMAGE_MARK, _TEXT], has_parts=True)
        shown = msgspec.structs.replace(traits, image_parts=(*traits.image_parts, role))
        without = output([*before, turn, *after], used, traits)
        written = inserted(without, output([*before, pictured, *after], used, shown))
        if not written or _TEXT not in without:
            continue
        if role == "user":
            traits = msgspec.structs.replace(shown, image_text=written)
        elif written.strip() == traits.image_text.strip():
            traits = shown
    return traits


def inserted(before: str, after: str) -> str:
    """Return the text that `after` has in addition to `before`, in one piece; "" if they differ
    otherwise."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
    start = sum(1 for _ in same)
    rest = before[start:]
    return after[start : len(after) - len(rest)] if after.endswith(rest) else ""
