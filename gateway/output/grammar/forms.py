"""Forms that several syntaxes write."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from protocol.grammar import Either, Form, Repeat, Sequence, Text


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


def repeated(item: Form, *, many: bool = True) -> Form:
    """As often as the model likes; never, if there may not be `many`."""
    return Repeat(item) if many else Text("")


def optional(item: Form) -> Form:
    return Repeat(item, 0, 1)


def quoted(text: str) -> str:
    """A JSON string."""
    return msgspec.json.encode(text).decode()
