"""Our grammar rules -> Lark: each form becomes an item, or a rule of its own if it needs one."""

from __future__ import annotations

from collections.abc import Mapping

from engine_core.grammar.lark import EMPTY, Speller, any_of, regex, up_to
from protocol.grammar import (
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


def lines_of(rules: Rules, schemas: Mapping[str, str], spell: Speller) -> list[str]:
    """Return the Lark lines of `rules`.

    `schemas`: the rules' name of a schema -> the name of its grammar in the list.
    """
    writer = _RuleWriter(spell, {name: f"rule-{n}" for n, name in enumerate(rules.rules)}, schemas)
    lines = [f"start: {writer.item(rules.start)}"]
    lines += [f"{writer.names[name]}: {writer.item(form)}" for name, form in rules.rules.items()]
    return lines + writer.lines


class _RuleWriter:
    """Writes forms as Lark items.

    - names: our name of each rule
    - lines: extra rules that items needed
    """

    def __init__(
        self, spell: Speller, names: Mapping[str, str], schemas: Mapping[str, str]
    ) -> None:
        self.names = names
        self.lines: list[str] = []
        self._spell = spell
        self._schemas = schemas
        self._until_rules: dict[Until, str] = {}

    def item(self, form: Form) -> str:
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
        if form not in self._until_rules:
            name = self._until_rules[form] = f"until-{len(self._until_rules)}"
            self.lines += up_to(name, form.end, self._spell, form.pattern)
        return self._until_rules[form]


def _times(least: int, most: int | None) -> str:
    if most is None and least < 2:
        return "+" if least else "*"
    return f"{{{least},{'' if most is None else most}}}"
