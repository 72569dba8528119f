"""Collects the rules and schemas of one grammar while it is written.

Equal schemas share one name, and so do equal forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.formats.event_builder import DeclaredTool
from gateway.formats.parser import Lexicon
from protocol.grammar import Form, GrammarRule, Json, Rules

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of a tool without parameters."""


class NotWritable(ValueError):
    """The format cannot write calls of a tool.

    field  part of the tool's `function` that cannot be written: "name", "parameters.properties.x"
    """

    def __init__(self, tool: str, field: str, why: str) -> None:
        super().__init__(why)
        self.tool = tool
        self.field = field


class GrammarBuilder:
    """Rules and schemas of one grammar.

    lexicon  markers of the format that are single tokens; some formats have variants that differ
             in these
    """

    def __init__(self, lexicon: Lexicon | None = None) -> None:
        self.lexicon = lexicon or Lexicon()
        self._rules: dict[str, Form] = {}
        self._schemas: dict[str, str] = {}

    def json(self, schema: Mapping[str, Any] | None) -> Json:
        """Return a form for JSON that `schema` admits; for any object if `schema` is empty."""
        text = msgspec.json.encode(schema or ANY_OBJECT).decode()
        for name, known in self._schemas.items():
            if known == text:
                return Json(name)
        name = f"schema-{len(self._schemas)}"
        self._schemas[name] = text
        return Json(name)

    def arguments(self, tool: DeclaredTool) -> Json:
        """Return a form for the arguments of `tool` as one JSON object."""
        return self.json({**(tool.parameters or {}), **ANY_OBJECT})

    def rule(self, hint: str, form: Form) -> GrammarRule:
        """Add `form` as a rule whose name begins with `hint`, or return the equal rule that
        exists.
        """
        for name, known in self._rules.items():
            if known == form:
                return GrammarRule(name)
        name = f"{hint}-{len(self._rules)}"
        self._rules[name] = form
        return GrammarRule(name)

    def define(self, name: str, form: Form) -> GrammarRule:
        """Add a rule with exactly this name. Forms may refer to it before it is defined."""
        assert self._rules.get(name, form) == form, f"two rules {name!r}"
        self._rules[name] = form
        return GrammarRule(name)

    def body(self, start: Form) -> Rules:
        """Return the whole grammar."""
        return Rules(start=start, rules=dict(self._rules), schemas=dict(self._schemas))
