"""Plain words for the values of fields: what a type allows, and what a request has instead.

    allowed_words(int | None)   a whole number or null
    shown(99)                   99
    shown("many")               the text "many"

No word is a name of Python's or of msgspec's. A value is shown in one short line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import inspect

MAX_SHOWN_CHARS = 40
"""Most characters of a text that `shown` shows."""
MAX_SHOWN_DIGITS = 24
"""Most characters of a number that `shown` shows."""
MAX_LISTED = 24
"""Most choices that `one_of` lists."""
_OBJECTS = (inspect.DictType, inspect.StructType, inspect.TypedDictType, inspect.DataclassType)


# ---- what is allowed


def plain_types(kind: inspect.Type) -> Iterator[inspect.Type]:
    """Yield the members of a union at any depth, or `kind` itself, without their metadata."""
    if isinstance(kind, inspect.Metadata):
        yield from plain_types(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from plain_types(member)
    else:
        yield kind


def allowed_words(kind: Any) -> str:
    """Return what a value of the type `kind` is: "a whole number of at least 1, or null".

    kind  a type, or its description by `msgspec.inspect`
    """
    described = kind if isinstance(kind, inspect.Type) else inspect.type_info(kind)
    types = list(plain_types(described))
    choices = [value for each in types for value in _choices(each)]
    named = [value for value in choices if value is not None]
    words = [word for each in types for word in _words_of(each)]
    words += [one_of(named)] if named else []
    words += ["null"] if None in choices else []
    return alternatives(list(dict.fromkeys(words)))


def alternatives(words: Sequence[str]) -> str:
    """Join words with "or", after a comma if a word before it has bounds or choices."""
    if len(words) < 2:
        return "".join(words)
    is_simple = _SIMPLE.issuperset(words[:-1])
    return f"{', '.join(words[:-1])}{' or ' if is_simple else ', or '}{words[-1]}"


def one_of(choices: Iterable[Any]) -> str:
    """Return the words for a choice: 'one of "low", "high"', or '"low"' if there is only one."""
    shown_choices = [f'"{each}"' if isinstance(each, str) else shown(each) for each in choices]
    if len(shown_choices) == 1:
        return shown_choices[0]
    more = len(shown_choices) - MAX_LISTED
    listed = ", ".join(shown_choices[:MAX_LISTED])
    return f"one of {listed}{f' and {more:,} others' if more > 0 else ''}"


def counted(number: int, unit: str) -> str:
    """Return a number with a unit: "1 item", "2,000 items"."""
    return f"{number:,} {unit}{'' if number == 1 else 's'}"


def _choices(kind: inspect.Type) -> list[Any]:
    """Return the values that a type lists; none if it lists none."""
    if isinstance(kind, inspect.LiteralType):
        return list(kind.values)
    if isinstance(kind, inspect.EnumType):
        return [member.value for member in kind.cls]
    return [None] if isinstance(kind, inspect.NoneType) else []


def _words_of(kind: inspect.Type) -> list[str]:
    """Return the words for a type; none if it lists its values."""
    match kind:
        case inspect.NoneType() | inspect.LiteralType() | inspect.EnumType():
            return []
        case inspect.BoolType():
            return ["true", "false"]
        case inspect.IntType():
            return ["a whole number" + _range(kind)]
        case inspect.FloatType():
            return ["a number" + _range(kind)]
        case inspect.StrType():
            return [_string(kind)]
        case inspect.TupleType():
            return [f"a list of {counted(len(kind.item_types), 'item')}"]
        case inspect.DictType():
            return ["an object" + _size(kind.min_length, kind.max_length, "member")]
        case inspect.CollectionType():
            return ["a list" + _size(kind.min_length, kind.max_length, "item")]
        case inspect.BytesType() | inspect.ByteArrayType() | inspect.MemoryViewType():
            return ["a string in base64"]
    return ["an object"] if isinstance(kind, _OBJECTS) else ["a JSON value"]


_SIMPLE = {"true", "false", "a whole number", "a number", "a string", "a list", "an object"}


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    """Return the bounds of a number: " from 0 to 2", " of at least 1", " above 0"."""
    multiple = "" if kind.multiple_of is None else f" that is a multiple of {kind.multiple_of}"
    if kind.ge is not None and kind.le is not None:
        return f" from {_number(kind.ge)} to {_number(kind.le)}{multiple}"
    bounds = {
        "above": kind.gt,
        "of at least": kind.ge,
        "below": kind.lt,
        "at most" if kind.gt is not None else "of at most": kind.le,
    }
    parts = [f"{word} {_number(limit)}" for word, limit in bounds.items() if limit is not None]
    return (" " + " and ".join(parts) if parts else "") + multiple


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _string(kind: inspect.StrType) -> str:
    if kind.pattern is not None:
        return f"a string that matches the pattern {kind.pattern}"
    if kind.min_length == 1 and kind.max_length is None:
        return "a string that is not empty"
    return "a string" + _size(kind.min_length, kind.max_length, "character")


def _size(least: int | None, most: int | None, unit: str) -> str:
    """Return the bounds of a size: " of 1 to 8 items", " of at most 8 items"."""
    if least is not None and most is not None:
        size = counted(most, unit)
        return f" of {size}" if least == most else f" of {least:,} to {size}"
    if least is not None:
        return f" of at least {counted(least, unit)}"
    return "" if most is None else f" of at most {counted(most, unit)}"


# ---- what came


def shown(value: Any) -> str:
    """Return a decoded JSON value in words that are short and safe in a line of a log."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return _shown_text(value)
    if isinstance(value, int | float):
        return _shown_number(value)
    if isinstance(value, Mapping):
        return f"an object of {counted(len(value), 'member')}" if value else "an empty object"
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray):
        return f"a list of {counted(len(value), 'item')}" if value else "an empty list"
    return "a value of another kind"


def _shown_text(text: str) -> str:
    if not text:
        return "an empty text"
    if len(text) <= MAX_SHOWN_CHARS:
        return f"the text {quoted(text)}"
    return f"a text of {len(text):,} characters that starts with {quoted(text)}"


def quoted(text: str) -> str:
    """Return the first MAX_SHOWN_CHARS characters of a text in quotes, on one line."""
    return f'"{"".join(map(_escaped, text[:MAX_SHOWN_CHARS]))}"'


def _escaped(letter: str) -> str:
    """Return a character, or its JSON escape if it would end the text or cannot be printed."""
    if letter in '"\\':
        return f"\\{letter}"
    return letter if letter.isprintable() else f"\\u{ord(letter):04x}"


def _shown_number(value: float) -> str:
    if isinstance(value, int) and abs(value) >= 10**MAX_SHOWN_DIGITS:
        return "a number of more than 24 digits"
    return str(value)
