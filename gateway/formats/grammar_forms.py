"""Building blocks of grammars: functions that make forms."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from protocol.grammar import Either, Form, LiteralForm, Pattern, Repeat, Sequence

ANY_TEXT = Pattern("(?s:.*)")
"""Any text."""


def sequence(*parts: Form | str) -> Form:
    """Return the parts one after another. Neighbouring literals are joined, as they may make up
    a marker.
    """
    items: list[Form] = []
    for part in parts:
        form = LiteralForm(part) if isinstance(part, str) else part
        for item in form.items if isinstance(form, Sequence) else (form,):
            if isinstance(item, LiteralForm) and items and isinstance(items[-1], LiteralForm):
                items[-1] = LiteralForm(items[-1].text + item.text)
            elif item != LiteralForm(""):
                items.append(item)
    return items[0] if len(items) == 1 else Sequence(items) if items else LiteralForm("")


def without_prefix(beginning: str, form: Form) -> Form:
    """Return the rest of `form`, which begins with the text `beginning`."""
    first, *rest = form.items if isinstance(form, Sequence) else [form]
    assert isinstance(first, LiteralForm)
    assert first.text.startswith(beginning)
    return sequence(first.text.removeprefix(beginning), *rest)


def either(options: Iterable[Form]) -> Form:
    """Return a form for one of `options`, of which there is at least one."""
    found = list(options)
    return found[0] if len(found) == 1 else Either(found)


def repeated(item: Form, *, many: bool = True) -> Form:
    """Return `item` repeated any number of times; if not `many`, the empty form."""
    return Repeat(item) if many else LiteralForm("")


def several(item: Form, between: Form | str = "", *, many: bool = True) -> Form:
    """Return one or more `item`s separated by `between`; exactly one if not `many`."""
    return sequence(item, repeated(sequence(between, item), many=many))


def optional(item: Form) -> Form:
    return Repeat(item, 0, 1)


def quoted(text: str) -> str:
    """Return `text` as a JSON string."""
    return msgspec.json.encode(text).decode()


def pattern_not_starting_with(beginnings: Iterable[str]) -> str:
    """Return a pattern of all texts that, after leading blanks, start with none of `beginnings`."""
    return rf"(?s:[ \t\r\n]*{_not_starting_with(set(beginnings), blanks=True)})"


def _not_starting_with(beginnings: set[str], *, blanks: bool = False) -> str:
    """Match nothing, a character that starts no beginning, or one that does followed by a
    mismatch.
    """
    firsts = sorted({text[0] for text in beginnings})
    others = "".join(map(_sign, firsts)) + (r" \t\r\n" if blanks else "")
    ways = [f"[^{others}].*"]
    for first in firsts:
        rests = {text[1:] for text in beginnings if text[0] == first}
        if "" not in rests:
            ways.append(_sign(first) + _not_starting_with(rests))
    return f"(?:{'|'.join(ways)})?"


def _sign(sign: str) -> str:
    return f"\\x{{{ord(sign):x}}}"


class AnswerFrame(msgspec.Struct, frozen=True):
    """Markup around the reasoning and around the answer proper.

    opens, closes  stand around a block of reasoning; `closes` includes all markup up to the next
                   part of the answer. "" if there is no reasoning, or if only the prompt opens it
    before, after  stand around content. The marker that ends the whole answer is not included
    """

    opens: str = ""
    closes: str = ""
    before: str = ""
    after: str = ""
