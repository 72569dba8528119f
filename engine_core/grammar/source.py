"""Grammar -> the text that llguidance compiles: a list of grammars, the first being the answer's.

All that a client wrote as plain text (choices, markers) becomes a regular expression in which every
sign is escaped by its number, so no text can be read as syntax. Schemas are passed on as they are,
with our options beside them: blanks are bounded, and no keyword is ever ignored.

Errors are InvalidRequest with param="grammar".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine_core.grammar.markers import Markers
from protocol.errors import InvalidRequest
from protocol.grammar import (
    Body,
    Choice,
    Gbnf,
    Grammar,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    Structural,
    Tag,
    Thinking,
)

MAX_BLANKS = 40
"""Between two items of JSON. A model that cannot decide would otherwise write blanks for ever."""
JSON_OPTIONS = msgspec.Raw(
    msgspec.json.encode(
        {
            "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_BLANKS}}}",
            "lenient": False,
            "coerce_one_of": False,
        }
    )
)
OPTIONS_KEY = "x-guidance"
BODY = "tidegate-body"
"""The name of the body where something precedes it."""
FREE = "FREE: /(?s:.*)/"
"""Any text, which never includes a marker."""
BLANKS = r"BLANKS: /[ \t\r\n]{1,8}/"

Part = dict[str, Any]
"""One grammar of the list, without its name: {"lark_grammar": ...} or {"json_schema": ...}."""


def write(grammar: Grammar, markers: Markers) -> str:
    """The whole grammar, in llguidance's JSON."""
    spell = speller(markers)
    body, others = _body(grammar.body, spell)
    parts = [body, *others]
    if grammar.thinking is not None:
        parts = [_lark(_thinking(grammar.thinking, spell)), body | {"name": BODY}, *others]
    return msgspec.json.encode({"grammars": parts}).decode()


# ---- texts

Speller = Callable[[str], str]


def speller(markers: Markers) -> Speller:
    """Writes a text as a sequence of Lark items: markers by their ids, the rest as literals."""
    longest_first = sorted(markers, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def spell(text: str) -> str:
        items, end = [], 0
        for found in pattern.finditer(text):
            items += [literal(text[end : found.start()]), f"<[{markers[found.group()]}]>"]
            end = found.end()
        items.append(literal(text[end:]))
        return " ".join(filter(None, items))

    return spell


def literal(text: str) -> str:
    """Exactly this text, as a Lark item; nothing for the empty text."""
    return f"/{''.join(map(_escaped, text))}/" if text else ""


def _escaped(sign: str) -> str:
    return sign if sign.isascii() and sign.isalnum() else f"\\x{{{ord(sign):x}}}"


# ---- bodies


def _body(body: Body, spell: Speller) -> tuple[Part, list[Part]]:
    """The body, and the named grammars that it refers to."""
    match body:
        case JsonSchema(text=text):
            return _schema(text), []
        case JsonObject():
            return _schema('{"type": "object"}'), []
        case Regex(pattern=pattern):
            return _lark([f"start: /{regex_to_lark(pattern)}/"]), []
        case Choice(choices=choices):
            return _lark(["start: CHOICE", f"CHOICE: {_any_of(map(_choice, choices))}"]), []
        case Lark(text=text, schemas=schemas):
            return _lark([text]), [_schema(s) | {"name": name} for name, s in schemas.items()]
        case Gbnf(text=text):
            return _lark([_from_gbnf(text)]), []
        case Structural():
            return _structural(body, spell)


def _lark(lines: Iterable[str]) -> Part:
    return {"lark_grammar": "\n".join(lines)}


def _schema(text: str) -> Part:
    try:
        keywords: dict[str, Any] = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(f"a schema is not a JSON object: {error}") from None
    if OPTIONS_KEY in keywords:
        raise invalid(f"a schema has the key {OPTIONS_KEY!r}, which is no keyword of JSON Schema")
    return {"json_schema": keywords | {OPTIONS_KEY: JSON_OPTIONS}}


def _choice(text: str) -> str:
    return literal(text) or '""'


def _any_of(items: Iterable[str]) -> str:
    return " | ".join(items)


def _from_gbnf(text: str) -> str:
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise invalid("is nested too deeply") from None
    except Exception as error:  # whatever a parser of somebody else's raises on what it cannot read
        raise invalid(f"is not GBNF: {error}") from None


# ---- thinking


def _thinking(thinking: Thinking, spell: Speller) -> list[str]:
    """Blocks of thinking, then the body.

    Within a block every text is possible but its end, which is a marker or the first occurrence of
    a text; the end of the answer is not possible before the body is complete.
    """
    blocks = "(block BLANKS?)"
    if thinking.inside:
        start = f"rest BLANKS? {blocks}*" if thinking.opens else "rest BLANKS?"
    else:
        start = f"{blocks}*" if thinking.optional else f"{blocks}+"
    lines = [f"start: {start} @{BODY}", *_up_to("rest", thinking.closes, spell), FREE, BLANKS]
    if thinking.opens:
        lines.append(f"block: {spell(thinking.opens)} rest")
    return lines


def _up_to(rule: str, end: str, spell: Speller) -> list[str]:
    """`rule`: free text, then `end` at its first occurrence."""
    first, _, others = spell(end).partition(" ")
    if first.startswith("<"):
        return [f"{rule}: FREE {first} {others}"]
    return [f"{rule}: {rule}-text {others}", f"{rule}-text[suffix={first}]: FREE"]


# ---- tags in free text


def _structural(body: Structural, spell: Speller) -> tuple[Part, list[Part]]:
    tag = _any_of(f"tag-{n}" for n in range(len(body.triggers)))
    if body.only_one:
        start = tag if body.at_least_one else f"{tag} | FREE"
    else:
        start = f"({tag}){'+' if body.at_least_one else '*'} FREE"
    lines = [f"start: {start}", FREE]
    for n, trigger in enumerate(body.triggers):
        tails = (
            _tail(index, one, trigger, spell)
            for index, one in enumerate(body.tags)
            if one.begin.startswith(trigger)
        )
        lines += [f"tag-{n}: head-{n} ({_any_of(tails)})", *_up_to(f"head-{n}", trigger, spell)]
    schemas = (_schema(one.schema) | {"name": f"schema-{n}"} for n, one in enumerate(body.tags))
    return _lark(lines), list(schemas)


def _tail(index: int, tag: Tag, trigger: str, spell: Speller) -> str:
    """What follows the trigger in a tag."""
    return f"{spell(tag.begin.removeprefix(trigger))} @schema-{index} {spell(tag.end)}"


def invalid(what: str) -> InvalidRequest:
    return InvalidRequest(f"the grammar: {what}", param="grammar")
