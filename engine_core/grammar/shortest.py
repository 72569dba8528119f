"""Bounds the text that a grammar in Lark demands without a choice.

llguidance computes such text at once, and uses some hundred bytes for each character. A grammar of
a few kilobytes can demand gigabytes: each of 20 rules that refers twice to the next one doubles its
length. llguidance limits neither the time nor the memory that this takes.

A text that is demanded is part of every derivation, so it is not longer than the shortest one. The
parser here reads what is needed for that: alternatives, groups and repetitions. It takes unknown
syntax for the empty text; llguidance refuses what it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from json import JSONDecoder

MAX_DEMANDED_CHARS = 128 << 10
"""Most characters that one alternative of a rule may demand. A mask before such a text takes 20 MB
for a moment, and each answer keeps 2 MB."""
MAX_UPDATES = 50
"""Most times that the length of a rule is computed, on average, until the search is given up."""
INFINITE = 1 << 60
"""Length of the shortest text of a rule that has no text."""

_TOKEN = re.compile(
    r"""
      (?P<comment> //[^\n]* )
    | (?P<define> ^[ \t]*[!?]*(?P<rule>[\w-]+)(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*: )
    | (?P<string> "(?P<text>(?:[^"\\]|\\.)*)"i? )
    | (?P<regex> /(?P<pattern>(?:[^/\\\n]|\\.)+)/[a-z]* )
    | (?P<marker> <[^>\n]*> )
    | (?P<inline> %\w+[ \t\r\n]*(?=\{) )
    | (?P<name> [\w-]+ )
    | (?P<repeat> \{[ ]*(?P<least>\d{0,9})[ ]*(?:,[ ]*\d*[ ]*)?\} | ~[ ]*(?P<times>\d{1,9}) )
    | (?P<sign> [|()\[\]?*+] )
    | (?P<broken> ["/<] )
    | (?P<other> . | \n )
    """,
    re.VERBOSE | re.MULTILINE,
)
"""A token of a grammar in Lark. `broken` starts one without an end, which llguidance refuses."""
_PATTERN_TOKEN = re.compile(
    r"""
      (?P<open> \((?:\?(?:[\w-]*:|P?<\w+>|[\w-]+(?=\))))? )
    | (?P<repeat> (?:(?P<quantifier>[?*+]) | \{(?P<least>\d{1,9})(?:,\d*)?\})\?? )
    | (?P<sign> [|)] )
    | (?P<character> \\[pPx]\{[^}]{0,60}\} | \\. | \[(?:\\.|[^\]\\])+\] | [^\[] )
    | (?P<broken> \[ )
    """,
    re.VERBOSE,
)
"""A token of a regular expression. `broken` is as in `_TOKEN`."""


def demands_too_much(lark: str) -> bool:
    """Return whether an alternative of a rule demands more than MAX_DEMANDED_CHARS characters."""
    rules = dict(_rules(lark))
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, tokens in rules.items():
        for used in {token for token in tokens if isinstance(token, str)} & rules.keys():
            users[used].append(name)
    lengths, longest = dict.fromkeys(rules, INFINITE), dict.fromkeys(rules, 0)
    waiting = dict.fromkeys(rules)  # an ordered set
    for _ in range(MAX_UPDATES * len(rules)):
        if not waiting:
            break
        name = next(reversed(waiting))
        del waiting[name]
        length, longest[name] = _measure(rules[name], lengths)
        if length < lengths[name]:
            lengths[name] = length
            waiting |= dict.fromkeys(users[name])
    return bool(waiting) or max(longest.values(), default=0) > MAX_DEMANDED_CHARS


@dataclass(frozen=True, slots=True)
class _Length:
    """A string or pattern of the grammar, whose shortest match has `chars` characters."""

    chars: int


@dataclass(frozen=True, slots=True)
class _Times:
    """A repetition of the item before it, at least `count` times."""

    count: int


@dataclass(frozen=True, slots=True)
class _Sign:
    """One of the characters | ( ) in a definition."""

    sign: str


_Token = _Length | _Times | _Sign | str
"""A string is the name of a rule."""


@dataclass(slots=True)
class _Group:
    """A group "(a | b" that is being read: the length of its shortest complete alternative, and
    the lengths of the items of the open one."""

    shortest: int = INFINITE
    items: list[int] = field(default_factory=list)

    def end_alternative(self) -> int:
        """End an alternative at a `|` or `)`. Return the length of its shortest text."""
        length = min(sum(self.items), INFINITE)
        self.shortest = min(self.shortest, length)
        self.items = []
        return length


def _measure(tokens: list[_Token], lengths: dict[str, int]) -> tuple[int, int]:
    """Return the length of the shortest text of a definition, and that of its longest alternative
    that has a text at all."""
    groups, longest = [_Group()], 0

    def note(length: int) -> None:
        nonlocal longest
        if length < INFINITE:
            longest = max(longest, length)

    for token in tokens:
        match token:
            case _Length(chars):
                groups[-1].items.append(chars)
            case _Times(count):
                if groups[-1].items:
                    groups[-1].items[-1] = min(groups[-1].items[-1] * count, INFINITE)
                    note(groups[-1].items[-1])
            case _Sign("|"):
                note(groups[-1].end_alternative())
            case _Sign("("):
                groups.append(_Group())
            case _Sign():
                if len(groups) > 1:
                    note(groups[-1].end_alternative())
                    shortest = groups.pop().shortest
                    groups[-1].items.append(shortest)
            case str(name):
                groups[-1].items.append(lengths.get(name, 0))
    while True:
        note(groups[-1].end_alternative())
        shortest = groups.pop().shortest
        if not groups:
            return shortest, longest
        groups[-1].items.append(shortest)


def _rules(lark: str) -> Iterator[tuple[str, list[_Token]]]:
    """Yield the name and the tokens of each definition. The tokens are complete at the end."""
    tokens: list[_Token] = []
    position = 0
    while found := _TOKEN.match(lark, position):
        position = found.end()
        match found.lastgroup:
            case "define":
                tokens = []
                yield found["rule"], tokens
            case "string":
                tokens.append(_Length(len(found["text"])))
            case "regex":
                tokens.append(_Length(_demanded_by(found["pattern"])))
            case "inline":
                position = _end_of_json(lark, position)
            case "name":
                tokens.append(found["name"])
            case "repeat":
                tokens.append(_Times(int(found["least"] or found["times"] or 0)))
            case "sign":
                tokens += _SIGNS[found["sign"]]
            case "broken":
                return


def _demanded_by(pattern: str) -> int:
    """Return the most characters that a regular expression demands at any place."""
    tokens: list[_Token] = []
    for found in _PATTERN_TOKEN.finditer(pattern):
        match found.lastgroup:
            case "open":
                tokens.append(_Sign("("))
            case "repeat" if found["least"]:
                tokens.append(_Times(int(found["least"])))
            case "repeat":
                tokens += _SIGNS[found["quantifier"]]
            case "sign":
                tokens += _SIGNS[found["sign"]]
            case "broken":
                break
            case _:
                tokens.append(_Length(1))
    return _measure(tokens, {})[1]


def _end_of_json(text: str, start: int) -> int:
    """Return where the JSON value at `start` ends. Return the end of the text if it is malformed,
    because llguidance refuses it."""
    try:
        return JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return len(text)


_SIGNS: dict[str, list[_Token]] = {
    "|": [_Sign("|")],
    "(": [_Sign("(")],
    ")": [_Sign(")")],
    "[": [_Sign("(")],
    "]": [_Sign(")"), _Times(0)],
    "?": [_Times(0)],
    "*": [_Times(0)],
    "+": [_Times(1)],
}
