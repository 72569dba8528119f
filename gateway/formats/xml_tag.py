"""How a tag spells the name of a tool or of an argument: `<f=NAME>` or `<f name="NAME">`."""

from __future__ import annotations

import re

MAX_TAG_CHARS = 1024
"""Most characters of a tag. A longer text is not a tag."""

ATTRIBUTE = re.compile(r'\s*([\w:.-]+)\s*=\s*(?:"([^"]*)"|\'([^\']*)\'|([^\s"\'=]+))')
PLAIN_NAME = re.compile(r"[^\s<>\"'=]+(?: [^\s<>\"'=]+)*")
QUOTED_NAME = re.compile(r'[^"<\r\n]+')


def plain_name(tag: str) -> str | None:
    """Return the name in a tag without quotes, or None if the tag is malformed."""
    return tag if PLAIN_NAME.fullmatch(tag) else None


def attributes_in(tag: str) -> dict[str, str] | None:
    """Return attribute -> value of a tag, or None if the tag is malformed. The tag may end with a
    slash."""
    attributes, end = {}, 0
    while match := ATTRIBUTE.match(tag, end):
        attributes[match[1]] = next(v for v in match.groups()[1:] if v is not None)
        end = match.end()
    return attributes if not tag[end:].strip("/ \t") else None


def written_name(name: str, *, quoted: bool) -> str | None:
    """Return a name as it is written in a tag, or None if a tag cannot contain it."""
    if len(name) > MAX_TAG_CHARS // 2:
        return None
    if quoted:
        return f'"{name}"' if QUOTED_NAME.fullmatch(name) else None
    return plain_name(name)
