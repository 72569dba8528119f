"""Forms that several syntaxes write."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from protocol.grammar import Either, Form, LiteralForm, Pattern, Repeat, Sequence

ANY_TEXT = Pattern("(?s:.*)")
"""Any text."""


def sequence(*parts: Form | str) -> Form:
    """One behind the other; neighbouring texts are one, as a marker may be made of both."""
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
    """What is left of `form`, which begins with this text."""
    first, *rest = form.items if isinstance(form, Sequence) else [form]
    assert isinstance(first, LiteralForm)
    assert first.text.startswith(beginning)
    return sequence(first.text.removeprefix(beginning), *rest)


def either(options: Iterable[Form]) -> Form:
    """One of these; there is at least one."""
    found = list(options)
    return found[0] if len(found) == 1 else Either(found)


def repeated(item: Form, *, many: bool = True) -> Form:
    """As often as the model likes; never, if there may not be `many`."""
    return Repeat(item) if many else LiteralForm("")


def several(item: Form, between: Form | str = "", *, many: bool = True) -> Form:
    """At least one, with something between; just one, if there may not be `many`."""
    return sequence(item, repeated(sequence(between, item), many=many))


def optional(item: Form) -> Form:
    return Repeat(item, 0, 1)


def quoted(text: str) -> str:
    """A JSON string."""
    return msgspec.json.encode(text).decode()


def pattern_not_starting_with(beginnings: Iterable[str]) -> str:
    """A pattern of all texts that begin, behind their blanks, with none of these."""
    return rf"(?s:[ \t\r\n]*{_not_starting_with(set(beginnings), blanks=True)})"


def _not_starting_with(beginnings: set[str], *, blanks: bool = False) -> str:
    """Nothing, or a character that none begins with, or one of theirs and then another way on."""
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
    """opens, closes  stand around a block of thinking; `closes` leads to where the next part of the
                   answer begins. "" where there is no thinking, or only the prompt opens it
    before, after  stand around content. What ends the whole answer is no part of it
    """

    opens: str = ""
    closes: str = ""
    before: str = ""
    after: str = ""
