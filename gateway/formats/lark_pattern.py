"""Converts a grammar in Lark to one regular expression of the texts that it admits.

A tool's argument is written inside a call, often with escapes: as a JSON string, a line break is
`\\n`. The grammar of the call can write a regular expression in each format's spelling
(`string_limits`), but not the terminals of another grammar one by one: after a backslash it would
be too late to decide where a terminal ends.

Rules are replaced by their definitions. A rule that contains itself is nested as deeply as
`MAX_CHARS` allows, so the expression may admit fewer texts than the grammar, but never others.
Priorities, and the names of alternatives, have no effect on which texts are admitted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from gateway.formats.lark_reader import (
    LarkName,
    LarkOptions,
    LarkPart,
    LarkReader,
    LarkRow,
    LarkText,
    LarkTimes,
)
from gateway.formats.lark_terminals import NotConvertible, terminal_pattern

MAX_CHARS = 12 << 10
"""Most characters of the regular expression."""
MAX_NESTING = 12
"""Most times that a rule is nested in itself."""


class _Expansion:
    """Replaces names by their definitions, with at most `nesting` rules that contain themselves
    inside one another."""

    def __init__(self, reader: LarkReader, nesting: int) -> None:
        self._definitions: Mapping[str, LarkPart] = reader.definitions
        self._nests = nesting_names(reader.definitions)
        self._nesting = nesting
        self._known: dict[tuple[str, int], str | None] = {}
        self._ignored = self._ignored_text(reader.ignored)

    def start(self) -> str | None:
        found = self._name("start", self._nesting, in_rule=True)
        return found if found is None or not self._ignored else self._ignored + found

    def _ignored_text(self, ignored: Sequence[LarkPart]) -> str:
        options = [self._part(part, self._nesting, in_rule=False) for part in ignored]
        texts = [text for text in options if text]
        return f"(?:{'|'.join(texts)})?" if texts else ""

    def _name(self, name: str, nesting: int, *, in_rule: bool) -> str | None:
        """Return the expression for a rule or a terminal; None if it needs deeper nesting."""
        if name not in self._definitions:
            raise NotConvertible(f"{name!r} is not defined")
        if name in self._nests:
            if nesting == 0:
                return None
            nesting -= 1
        is_rule = not name.lstrip("_")[:1].isupper()
        key = (name, nesting)
        if key not in self._known:
            part = self._part(self._definitions[name], nesting, in_rule=in_rule and is_rule)
            if part is not None and len(part) > MAX_CHARS:
                raise _TooLong
            self._known[key] = part
        found = self._known[key]
        return found if is_rule or not in_rule else self._followed(found)

    def _followed(self, text: str | None) -> str | None:
        """Return a terminal in a rule, with what may be ignored after it."""
        return text if text is None or not self._ignored else f"{_group(text)}{self._ignored}"

    def _part(self, part: LarkPart, nesting: int, *, in_rule: bool) -> str | None:
        match part:
            case LarkName(name):
                return self._name(name, nesting, in_rule=in_rule)
            case LarkText(pattern):
                return self._followed(pattern) if in_rule else pattern
            case LarkRow(items):
                return _row([self._part(item, nesting, in_rule=in_rule) for item in items])
            case LarkOptions(options):
                ways = [self._part(one, nesting, in_rule=in_rule) for one in options]
                texts = list(dict.fromkeys(way for way in ways if way is not None))
                _check_length(texts)
                return "|".join(texts) if texts else None
            case LarkTimes(item, least, most):
                inner = self._part(item, nesting, in_rule=in_rule)
                if inner is None:
                    return "" if least == 0 else None
                return f"{_group(inner, repeats=True)}{_times(least, most)}" if inner else ""


def _row(parts: Sequence[str | None]) -> str | None:
    """Return the expression of parts that follow each other; None if one of them is None."""
    texts = [part for part in parts if part is not None]
    if len(texts) < len(parts):
        return None
    _check_length(texts)
    grouped = {text: _group(text) for text in set(texts)}
    return "".join(grouped[text] for text in texts)


def _check_length(texts: Sequence[str]) -> None:
    """Raise _TooLong if an expression of these texts would be too long. It is not made then."""
    if sum(map(len, texts)) > MAX_CHARS:
        raise _TooLong


class _TooLong(Exception):
    """Raised if an expression exceeds MAX_CHARS."""


def _group(text: str, *, repeats: bool = False) -> str:
    """Return the expression in parentheses, unless it can do without in a sequence, or if `repeats`
    before a repetition."""
    is_one = re.fullmatch(r"\\?.|\\u[0-9a-f]{4}|\[(?:[^\]\\]|\\.)*\]", text, re.DOTALL)
    if is_one or (not repeats and "|" not in text):
        return text
    return f"(?:{text})"


def _times(least: int, most: int | None) -> str:
    if most is None and least < 2:
        return "+" if least else "*"
    if (least, most) == (0, 1):
        return "?"
    return f"{{{least},{'' if most is None else most}}}" if least != most else f"{{{least}}}"


def nesting_names(definitions: Mapping[str, LarkPart]) -> frozenset[str]:
    """Return the rules at which the grammar nests: those that are reached again from themselves on
    the way from `start`. Without them no definition contains itself."""
    found: set[str] = set()
    done: set[str] = set()
    open_names: dict[str, None] = {}
    rests: list[Iterator[str]] = []

    def enter(name: str) -> None:
        open_names[name] = None
        rests.append(_names(definitions[name]))

    for first in ("start", *definitions):
        if first in definitions and first not in done:
            enter(first)
        while rests:
            name = next(rests[-1], None)
            if name is None:
                done.add(open_names.popitem()[0])
                rests.pop()
            elif name in open_names:
                found.add(name)
            elif name in definitions and name not in done:
                enter(name)
    return frozenset(found)


def _names(part: LarkPart) -> Iterator[str]:
    match part:
        case LarkName(name):
            yield name
        case LarkRow(parts) | LarkOptions(parts):
            for one in parts:
                yield from _names(one)
        case LarkTimes(item):
            yield from _names(item)


def lark_pattern(source: str) -> str:
    """Return a regular expression of the texts that a grammar in Lark admits, in the syntax that
    ECMAScript, Python and Rust share. Raise NotConvertible if the grammar is invalid, or if it has
    a part that is not supported."""
    try:
        return _lark_pattern(source)
    except RecursionError:
        raise NotConvertible("its rules are nested too deeply") from None


def _lark_pattern(source: str) -> str:
    reader = LarkReader(source)
    if "start" not in reader.definitions:
        raise NotConvertible("the grammar has no rule 'start'")
    nests = bool(nesting_names(reader.definitions))
    best: str | None = None
    for nesting in range(1, MAX_NESTING + 1) if nests else (0,):
        try:
            found = _Expansion(reader, nesting).start()
        except _TooLong:
            break
        best = found if found is not None else best
    if best is None:
        raise NotConvertible(
            f"the grammar admits no text, or needs more than {MAX_CHARS:,} characters as a regular "
            "expression"
        )
    return best


def regex_pattern(source: str) -> str:
    """Return a regular expression of Python in the syntax that ECMAScript, Python and Rust share.
    Raise NotConvertible if a part is not supported."""
    ends = len(source) - 1
    if source.endswith("$") and (len(source[:ends]) - len(source[:ends].rstrip("\\"))) % 2 == 0:
        source = source[:ends]
    try:
        return terminal_pattern(source.removeprefix("^"))
    except RecursionError:
        raise NotConvertible("its groups are nested too deeply") from None
