"""Forms that several syntaxes write."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from protocol.grammar import Either, Form, Pattern, Repeat, Sequence, Text

BLANKS = Pattern(r"[ \n]{1,2}")
"""Between calls: bounded, as a model that cannot decide would write them for ever."""


def sequence(*parts: Form | str) -> Form:
    """One behind the other; neighbouring texts are one, as a marker may be made of both."""
    items: list[Form] = []
    for part in parts:
        form = Text(part) if isinstance(part, str) else part
        if isinstance(form, Text) and items and isinstance(items[-1], Text):
            items[-1] = Text(items[-1].text + form.text)
        elif form != Text(""):
            items.append(form)
    return items[0] if len(items) == 1 else Sequence(items) if items else Text("")


def either(options: Iterable[Form]) -> Form:
    """One of these; there is at least one."""
    found = list(options)
    return found[0] if len(found) == 1 else Either(found)


def several(item: Form, between: Form | str = "", *, many: bool = True) -> Form:
    """At least one, with something between; just one, if there may not be `many`."""
    if not many:
        return item
    return sequence(item, Repeat(sequence(between, item)))


def optional(item: Form) -> Form:
    return Repeat(item, 0, 1)


def quoted(text: str) -> str:
    """A JSON string."""
    return msgspec.json.encode(text).decode()
