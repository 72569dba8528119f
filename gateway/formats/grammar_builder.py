"""The rules and schemas of one grammar, collected while it is written.

What several calls have in common is written once: equal schemas get one name, and so do equal
forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.formats.event_builder import DeclaredTool
from gateway.formats.parser import Lexicon
from protocol.grammar import Form, GrammarRule, Json, Rules

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of a tool that has none."""


class NotWritable(ValueError):
    """The format cannot write calls of a tool.

    field  the part of the tool's `function` that it cannot write: "name",
           "parameters.properties.x", ...
    """

    def __init__(self, tool: str, field: str, why: str) -> None:
        super().__init__(why)
        self.tool = tool
        self.field = field


class GrammarBuilder:
    """lexicon  which of the format's markers are tokens; variants of a format are told by it"""

    def __init__(self, lexicon: Lexicon | None = None) -> None:
        self.lexicon = lexicon or Lexicon()
        self._rules: dict[str, Form] = {}
        self._schemas: dict[str, str] = {}

    def json(self, schema: Mapping[str, Any] | None) -> Json:
        """JSON that `schema` admits; any object, where there is none."""
        text = msgspec.json.encode(schema or ANY_OBJECT).decode()
        for name, known in self._schemas.items():
            if known == text:
                return Json(name)
        name = f"schema-{len(self._schemas)}"
        self._schemas[name] = text
        return Json(name)

    def arguments(self, tool: DeclaredTool) -> Json:
        """The arguments of `tool` as one JSON object."""
        return self.json({**(tool.parameters or {}), **ANY_OBJECT})

    def rule(self, hint: str, form: Form) -> GrammarRule:
        """`form` as a rule, whose name begins with `hint`."""
        for name, known in self._rules.items():
            if known == form:
                return GrammarRule(name)
        name = f"{hint}-{len(self._rules)}"
        self._rules[name] = form
        return GrammarRule(name)

    def define(self, name: str, form: Form) -> GrammarRule:
        """A rule of just this name, which forms may have referred to already."""
        assert self._rules.get(name, form) == form, f"two rules {name!r}"
        self._rules[name] = form
        return GrammarRule(name)

    def body(self, start: Form) -> Rules:
        """The whole grammar."""
        return Rules(start=start, rules=dict(self._rules), schemas=dict(self._schemas))
