"""Grammar -> llguidance's input: a list of grammars, the first of which is the answer's.

Schemas are passed on as they are, plus our options: whitespace is bounded, and no keyword is
ignored.

Errors are InvalidRequest with param="grammar".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine_core.grammar.lark import (
    ANY_TEXT,
    EMPTY,
    Speller,
    any_of,
    lines_of,
    literal,
    regex,
    speller,
    up_to,
)
from engine_core.grammar.markers import Markers
from protocol.errors import InvalidRequest
from protocol.grammar import (
    Body,
    ChoiceGrammar,
    Gbnf,
    Grammar,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    Rules,
    Structural,
    Tag,
    Thinking,
)

MAX_BLANKS = 8
"""Most whitespace characters between two items of JSON, line feeds included.

Without a limit, an undecided model would write blanks forever. JSON may still be arbitrarily deep,
on one line or many: deeper indentation is cut to seven columns. A separate pattern for indentation
would keep deep documents as they are, but would let such a model continue, too.
"""
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
"""Name of the body's grammar if other rules surround it."""
CALLS = "tidegate-calls"
"""The name of the calls that an answer may be instead, and the beginning of their schemas' names.
"""
FREE = f"FREE: /{ANY_TEXT}/"
BLANKS = r"BLANKS: /[ \t\r\n]{1,8}/"

Part = dict[str, Any]
"""One grammar of the list, without its name: {"lark_grammar": ...} or {"json_schema": ...}."""


def write(grammar: Grammar, markers: Markers) -> str:
    """Return the whole grammar as llguidance's JSON. It must have a body."""
    assert grammar.body is not None, "free text has no grammar"
    spell = speller(markers)
    body, others = _body(grammar.body, spell)
    parts = [body, *others]
    if grammar.thinking or grammar.before or grammar.after or grammar.calls:
        parts = [_lark(_around(grammar, spell)), body | {"name": BODY}, *others]
    if grammar.calls is not None:
        calls, schemas = _rules(grammar.calls, spell, prefix=f"{CALLS}-")
        parts += [calls | {"name": CALLS}, *schemas]
    return msgspec.json.encode({"grammars": parts}).decode()


# ---- bodies


def _body(body: Body, spell: Speller) -> tuple[Part, list[Part]]:
    """Return the body, and the named grammars that it refers to."""
    match body:
        case JsonSchema(text=text):
            return _schema(text), []
        case JsonObject():
            return _schema('{"type": "object"}'), []
        case Regex(pattern=pattern):
            return _lark([f"start: {regex(pattern)}"]), []
        case ChoiceGrammar(choices=choices):
            return _lark(["start: CHOICE", f"CHOICE: {any_of(map(_choice, choices))}"]), []
        case Lark(text=text, schemas=schemas):
            return _lark([text]), _named(schemas)
        case Gbnf(text=text):
            return _lark([_from_gbnf(text)]), []
        case Structural():
            return _structural(body, spell)
        case Rules():
            return _rules(body, spell)


def _rules(rules: Rules, spell: Speller, prefix: str = "") -> tuple[Part, list[Part]]:
    """Return the rules and their schemas.

    Schema names start with `prefix`, because all grammars of an answer share one namespace.
    """
    names = {name: f"{prefix}schema-{n}" for n, name in enumerate(rules.schemas)}
    schemas = {names[name]: text for name, text in rules.schemas.items()}
    return _lark(lines_of(rules, names, spell)), _named(schemas)


def _lark(lines: Iterable[str]) -> Part:
    return {"lark_grammar": "\n".join(lines)}


def _schema(text: str) -> Part:
    try:
        keywords: dict[str, Any] = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(f"a schema is not a JSON object: {error}") from None
    if OPTIONS_KEY in keywords:
        raise invalid(f"a schema has the reserved key {OPTIONS_KEY!r}")
    return {"json_schema": keywords | {OPTIONS_KEY: JSON_OPTIONS}}


def _named(schemas: Mapping[str, str]) -> list[Part]:
    return [_schema(text) | {"name": name} for name, text in schemas.items()]


def _choice(text: str) -> str:
    return literal(text) or EMPTY


def _from_gbnf(text: str) -> str:
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise invalid("is nested too deeply") from None
    except Exception as error:  # foreign parser: any exception means that it cannot read the text
        raise invalid(f"is not GBNF: {error}") from None


# ---- around the body


def _around(grammar: Grammar, spell: Speller) -> list[str]:
    """Return the rules of the whole answer. `BODY` refers to the body, `CALLS` to the calls."""
    framed = f"framed: {spell(grammar.before)} @{BODY} {spell(grammar.after)}"
    if grammar.calls is not None:
        framed += f" | @{CALLS}"
    if grammar.thinking is None:
        return ["start: framed", framed]
    return [*_thinking(grammar.thinking, spell, many=grammar.budget is None), framed]


def _thinking(thinking: Thinking, spell: Speller, *, many: bool) -> list[str]:
    """Return the rules for thinking blocks, followed by the body.

    `many` allows more than one block. With a budget only one is allowed: a model could otherwise
    keep opening blocks that are closed at once.

    Within a block any text is allowed up to its end, which is a marker or the first occurrence of a
    text. The answer cannot end before the body is complete.
    """
    block = "(block BLANKS?)"
    if thinking.inside:
        start = f"rest BLANKS? {block}*" if thinking.opens and many else "rest BLANKS?"
    elif thinking.optional:
        start = f"{block}{'*' if many else '?'}"
    else:
        start = f"{block}{'+' if many else ''}"
    lines = [f"start: {start} framed", *up_to("rest", thinking.closes, spell), BLANKS]
    if thinking.opens:
        lines.append(f"block: {spell(thinking.opens)} rest")
    return lines


# ---- tags in free text


def _structural(body: Structural, spell: Speller) -> tuple[Part, list[Part]]:
    tag = any_of(f"tag-{n}" for n in range(len(body.triggers)))
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
        lines += [f"tag-{n}: head-{n} ({any_of(tails)})", *up_to(f"head-{n}", trigger, spell)]
    schemas = (_schema(one.schema) | {"name": f"schema-{n}"} for n, one in enumerate(body.tags))
    return _lark(lines), list(schemas)


def _tail(index: int, tag: Tag, trigger: str, spell: Speller) -> str:
    """Return what follows the trigger in a tag."""
    return f"{spell(tag.begin.removeprefix(trigger))} @schema-{index} {spell(tag.end)}"


def invalid(what: str) -> InvalidRequest:
    return InvalidRequest(f"the grammar: {what}", param="grammar")
