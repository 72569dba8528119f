"""The header of a harmony message: its role, recipient and channel.

    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>

A model may leave out the markers between two messages. So a channel marker in a text starts the
next header, if the text after it can be a header. A role at the end of the text (`assistant`,
perhaps with a recipient) may belong to that header, so it is held back until something else
follows. Between messages, a header need not start with `<|start|>`. If it starts with the role,
`<|channel|>` may be missing as well:

    <|end|>assistantfinal<|message|>Hello.<|return|>
    <|end|>assistantcommentary to=functions.f json{"a": 1}<|call|>

Such text is a header only if `<|message|>` follows it. In the header of any call, `<|message|>` may
be missing: if the header names a declared function, the `{` of the arguments may follow instead.
"""

from __future__ import annotations

import re
from functools import cache

from gateway.formats.event_builder import BLANKS

MAX_HEADER_CHARS = 512
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
HEADER_TEXT = re.compile(r"\s*+\w*+(?:\s+to=[\w.\-*]*+)?(?:\s*+\w*+)?\s*+")
"""Text that may follow a marker in a header. Every prefix of such a text matches, too."""
ROLE = "assistant"
HEADER_WORDS = (ROLE, "to=")
ROLE_TEXT = re.compile(rf"{ROLE}(?:\s{{1,8}}(?:t|to|to=[\w.\-*]{{0,128}}\s{{0,8}})?)?")
"""The role at the end of a text, possibly with a recipient or the start of one."""
FUNCTIONS = "functions."
"""The start of a recipient that is a function of the request."""


@cache
def header_start(channels: tuple[str, ...] = ()) -> re.Pattern[str]:
    """Return the pattern of a header before its first marker. A channel may follow the role."""
    channel = rf"(?:(?:{'|'.join(channels)})\s*+)?+" if channels else ""
    return re.compile(rf"\s*+(?:{ROLE}\s*+{channel})?+(?:to=[\w.\-*]*+\s*+\w*+\s*+)?+")


def recipient_in(header: str) -> str:
    """Return the recipient that the header names, or "" if it names none."""
    found = RECIPIENT.search(header)
    return found[1] if found else ""


def channel_in(header: str, marker: str) -> str:
    """Return the header's text from the channel's name on. `marker` is the channel marker.

    The marker may be missing after the role.
    """
    named = header.partition(marker)[2]
    return (named or header.strip(BLANKS).removeprefix(ROLE)).strip(BLANKS)


def role_start(text: str) -> int:
    """Return where the role at the end of `text` starts. The role may be incomplete.

    Return the length of `text` if there is no role at its end.
    """
    start = text.rfind(ROLE)
    if start >= 0 and ROLE_TEXT.fullmatch(text, start):
        return start
    sizes = range(min(len(ROLE) - 1, len(text)), 0, -1)
    return len(text) - next((n for n in sizes if text.endswith(ROLE[:n])), 0)
