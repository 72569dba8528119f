"""Writes a grammar as llguidance's input: a list of grammars that refer to each other by name.

The first grammar of the list describes the whole answer. JSON Schemas are passed on with two
options: whitespace is bounded, and an unsupported keyword is an error.

Errors are raised as InvalidRequest with param="grammar".
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
    literal,
    regex,
    rule_lines,
    speller,
    up_to,
)
from engine_core.grammar.markers import Markers
from engine_core.grammar.shortest import MAX_DEMANDED_CHARS, demands_too_much
from protocol.engine.grammar import (
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
from protocol.engine.schema_literals import check_literals
from protocol.wire.errors import InvalidRequest

MAX_BLANKS = 8
"""Maximum number of whitespace characters between two items of JSON, line feeds included.

Without a limit, some models write whitespace forever. JSON may still be nested arbitrarily deep:
only its indentation is limited, to seven columns after a line feed. A pattern that allows more
indentation would not stop such models.
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
"""Name of the body's grammar in the list, if the answer consists of more than the body."""
CALLS = "tidegate-calls"
"""Name of the grammar of `Grammar.calls` in the list, and prefix of the names of its schemas."""
FREE = f"FREE: /{ANY_TEXT}/"
"""Lark line of the terminal for free text."""
BLANKS = r"BLANKS: /[ \t\r\n]{1,8}/"
"""Lark line of the terminal for whitespace after a thinking block."""

Part = dict[str, Any]
"""One grammar of llguidance's list: {"lark_grammar": ...} or {"json_schema": ...}, and its name."""


def write_grammar(grammar: Grammar, markers: Markers) -> str:
    """Return a grammar as the JSON text that llguidance reads. The grammar must have a body.
    `markers` has the id of each marker of the model."""
    assert grammar.body is not None, "free text has no grammar"
    spell = speller(markers)
    body, others = _body(grammar.body, spell)
    parts = [body, *others]
    if grammar.thinking or grammar.before or grammar.after or grammar.calls:
        parts = [_lark(_answer_rules(grammar, spell)), body | {"name": BODY}, *others]
    if grammar.calls is not None:
        calls, schemas = _rules(grammar.calls, spell, prefix=f"{CALLS}-")
        parts += [calls | {"name": CALLS}, *schemas]
    return msgspec.json.encode({"grammars": parts}).decode()


# ---- bodies


def _body(body: Body, spell: Speller) -> tuple[Part, list[Part]]:
    """Return the body's grammar, and the named grammars that it refers to."""
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
            return _bounded(_lark([text])), _named(schemas)
        case Gbnf(text=text):
            return _bounded(_lark([_from_gbnf(text)])), []
        case Structural():
            return _structural(body, spell)
        case Rules():
            return _rules(body, spell)


def _rules(rules: Rules, spell: Speller, prefix: str = "") -> tuple[Part, list[Part]]:
    """Return the grammar of `rules`, and the named grammars of their schemas. The names start with
    `prefix`, because all grammars of an answer share one namespace."""
    names = {name: f"{prefix}schema-{n}" for n, name in enumerate(rules.schemas)}
    schemas = {names[name]: text for name, text in rules.schemas.items()}
    return _bounded(_lark(rule_lines(rules, names, spell))), _named(schemas)


def _lark(lines: Iterable[str]) -> Part:
    return {"lark_grammar": "\n".join(lines)}


def _bounded(part: Part) -> Part:
    """Return a grammar in Lark. Raise InvalidRequest if it demands too long a text."""
    if demands_too_much(part["lark_grammar"]):
        raise invalid(f"demands a text of more than {MAX_DEMANDED_CHARS:,} characters")
    return part


def _schema(text: str) -> Part:
    try:
        keywords: dict[str, Any] = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        check_literals(msgspec.json.decode(text), "schema")
    except InvalidRequest as error:
        raise invalid(error.message) from None
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
    except Exception as error:  # the parser of llguidance raises many types for malformed text
        raise invalid(f"is not GBNF: {error}") from None


# ---- the whole answer


def _answer_rules(grammar: Grammar, spell: Speller) -> list[str]:
    """Return the Lark lines of the whole answer, which refer to the grammars BODY and CALLS."""
    framed = f"framed: {spell(grammar.before)} @{BODY} {spell(grammar.after)}"
    if grammar.calls is not None:
        framed += f" | @{CALLS}"
    if grammar.thinking is None:
        return ["start: framed", framed]
    # With a budget, only one block is allowed. Otherwise a model could open blocks forever, each of
    # which the exhausted budget would close at once.
    lines = _thinking(grammar.thinking, spell, allows_many=grammar.budget is None)
    return [*lines, framed]


def _thinking(thinking: Thinking, spell: Speller, *, allows_many: bool) -> list[str]:
    """Return the Lark lines for thinking blocks, followed by the rule `framed`. A block may contain
    any text up to the first occurrence of its end. `allows_many` allows more than one block."""
    block = "(block BLANKS?)"
    if thinking.inside:
        start = f"rest BLANKS? {block}*" if thinking.opens and allows_many else "rest BLANKS?"
    elif thinking.optional:
        start = f"{block}{'*' if allows_many else '?'}"
    else:
        start = f"{block}{'+' if allows_many else ''}"
    lines = [f"start: {start} framed", *up_to("rest", thinking.closes, spell), BLANKS]
    if thinking.opens:
        lines.append(f"block: {spell(thinking.opens)} rest")
    return lines


# ---- tags in free text


def _structural(body: Structural, spell: Speller) -> tuple[Part, list[Part]]:
    """Return the grammar of free text with tags, and the named grammars of the tags' schemas."""
    any_tag = any_of(f"tag-{n}" for n in range(len(body.triggers)))
    if body.only_one:
        start = any_tag if body.at_least_one else f"{any_tag} | FREE"
    else:
        start = f"({any_tag}){'+' if body.at_least_one else '*'} FREE"
    lines = [f"start: {start}", FREE]
    for n, trigger in enumerate(body.triggers):
        tails = (
            _tag_after_trigger(index, tag, trigger, spell)
            for index, tag in enumerate(body.tags)
            if tag.begin.startswith(trigger)
        )
        lines += [f"tag-{n}: head-{n} ({any_of(tails)})", *up_to(f"head-{n}", trigger, spell)]
    schemas = (_schema(tag.schema) | {"name": f"schema-{n}"} for n, tag in enumerate(body.tags))
    return _lark(lines), list(schemas)


def _tag_after_trigger(index: int, tag: Tag, trigger: str, spell: Speller) -> str:
    """Return the Lark items for the part of a tag after its trigger."""
    return f"{spell(tag.begin.removeprefix(trigger))} @schema-{index} {spell(tag.end)}"


def invalid(reason: str) -> InvalidRequest:
    """Return the error for a grammar that cannot be enforced."""
    return InvalidRequest(f"the grammar: {reason}", param="grammar")
