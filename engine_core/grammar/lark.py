"""Writes texts, markers and our grammar rules in llguidance's Lark dialect.

Plain text from a client or a format becomes a regular expression. Every character except ASCII
letters and digits is written as its code point, so no text can be read as syntax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from llguidance import regex_to_lark

from engine_core.grammar.markers import Markers, divider
from protocol.engine.grammar import (
    Either,
    Form,
    GrammarRule,
    Json,
    LiteralForm,
    Pattern,
    Repeat,
    Rules,
    Sequence,
    Until,
)

ANY_TEXT = "(?s:.*)"
"""Regular expression for any text. It never matches a marker."""
EMPTY = '""'

Speller = Callable[[str], str]
"""A function that writes a text, in which markers are spelled out, as Lark items."""


def speller(markers: Markers) -> Speller:
    """Return a function that writes a text as Lark items: the ids of its markers, and literals for
    the text between them."""
    divide = divider(markers)

    def spell(text: str) -> str:
        parts = enumerate(divide(text))
        items = (f"<[{markers[part]}]>" if n % 2 else literal(part) for n, part in parts)
        return " ".join(filter(None, items))

    return spell


def literal(text: str) -> str:
    """Return a Lark item that matches exactly this text; "" for the empty text."""
    return f"/{''.join(map(_escaped, text))}/" if text else ""


def _escaped(sign: str) -> str:
    return sign if sign.isascii() and sign.isalnum() else f"\\x{{{ord(sign):x}}}"


def regex(pattern: str) -> str:
    """Return a Lark item for a text that `pattern` matches completely."""
    return f"/{regex_to_lark(pattern)}/"


def any_of(items: Iterable[str]) -> str:
    """Return the Lark expression that matches one of `items`, without parentheses."""
    return " | ".join(items)


def up_to(rule: str, end: str, spell: Speller, pattern: str = ANY_TEXT) -> list[str]:
    """Return the Lark lines of a rule: text that matches `pattern`, up to the first `end`, which is
    included."""
    return until_lines(rule, Until(end, pattern), spell)


def until_lines(rule: str, form: Until, spell: Speller) -> list[str]:
    """Return the Lark lines of a rule for `form`. If it has `but_not`, one of these patterns must
    rule out `form.end`.

    The part of `end` before its first marker may occur in the text. So the text and this part are
    one terminal. As a terminal of its own, the part would end the text wherever it occurs.
    """
    first, _, rest = spell(form.end).partition(" ")
    lines: list[str] = []
    text = regex(form.pattern)
    if form.but_not:
        name = rule.upper().replace("-", "_")
        # One negation of all of them takes ten times as long for each token.
        lines = [f"{name}: {' & ~'.join((text, *map(regex, form.but_not)))}"]
        then = f" {regex(form.then)}" if form.then else ""
        if first.startswith("<"):
            return [*lines, f"{name}_THEN: {name}{then}", f"{rule}: {name}_THEN {first} {rest}"]
        return [*lines, f"{name}_END: {name}{then} {first}", f"{rule}: {name}_END {rest}"]
    if form.then:
        text = regex(f"(?:{form.pattern})(?:{form.then})")
    if first.startswith("<"):
        return [f"{rule}: {text} {first} {rest}"]
    if rest:
        return [f"{rule}: /({text[1:-1]}){first[1:-1]}/ {rest}"]
    return [f"{rule}: {rule}-text", f"{rule}-text[suffix={first}]: {text}"]


def rule_lines(rules: Rules, schemas: Mapping[str, str], spell: Speller) -> list[str]:
    """Return the Lark lines of `rules`. `schemas` maps the name of a schema in `rules` to the name
    of its grammar in llguidance's list."""
    writer = _RuleWriter(spell, {name: f"rule-{n}" for n, name in enumerate(rules.rules)}, schemas)
    lines = [f"start: {writer.item(rules.start)}"]
    lines += [f"{writer.names[name]}: {writer.item(form)}" for name, form in rules.rules.items()]
    return lines + writer.lines


class _RuleWriter:
    """Writes forms as Lark items."""

    def __init__(
        self, spell: Speller, names: Mapping[str, str], schemas: Mapping[str, str]
    ) -> None:
        #: Name of a rule in `Rules` -> its name in Lark.
        self.names = names
        #: Additional Lark rules that the written items refer to.
        self.lines: list[str] = []
        self._spell = spell
        self._schemas = schemas
        self._until_rules: dict[Until, str] = {}

    def item(self, form: Form) -> str:
        """Return the Lark item for `form`."""
        match form:
            case LiteralForm(text):
                return self._spell(text) or EMPTY
            case Json(schema):
                return f"@{self._schemas[schema]}"
            case Pattern(pattern):
                return regex(pattern)
            case Until():
                return self._until(form)
            case GrammarRule(rule):
                return self.names[rule]
            case Sequence(items):
                return " ".join(map(self.item, items)) or EMPTY
            case Either(options):
                return f"({any_of(map(self.item, options))})"
            case Repeat(item, least, most):
                return f"({self.item(item)}){_times(least, most)}"

    def _until(self, form: Until) -> str:
        """Return the name of a rule for `form`. Equal forms share one rule."""
        if form not in self._until_rules:
            name = self._until_rules[form] = f"until-{len(self._until_rules)}"
            self.lines += until_lines(name, form, self._spell)
        return self._until_rules[form]


def _times(least: int, most: int | None) -> str:
    """Return the Lark suffix for `least` to `most` repetitions."""
    if most is None and least < 2:
        return "+" if least else "*"
    return f"{{{least},{'' if most is None else most}}}"
