"""A tool's arguments, as all formats see them: members with names, some may be left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.formats.grammar_forms import either, optional, sequence
from gateway.formats.schema_cases import Schemas
from gateway.formats.value_syntax import Values
from protocol.grammar import Form, LiteralForm, Repeat

PATH = "parameters"

ArgumentWriter = Callable[[str | None, Any, str], Form | None]
"""(name, schema, path) -> one argument; None: the format cannot write the name. Without a name it
may have any, and the schema is that of the value."""


def arguments_form(values: Values, write: ArgumentWriter, comma: Form | None = None) -> Form:
    """All arguments of one call, in the schema's order."""
    schemas = values.schemas
    return either(
        _members(values, case.limits, write, comma)
        for case in schemas.cases(schemas.root, PATH)
        if case.kind == "object" or _refuse_kind(schemas)
    )


def _refuse_kind(schemas: Schemas) -> bool:
    """Parameters that say nothing admit every type: of these, arguments are only ever objects."""
    if schemas.root and "type" in schemas.root:
        schemas.refuse(PATH, "type", "must be 'object'")
    return False


def _members(values: Values, limits: Any, write: ArgumentWriter, comma: Form | None) -> Form:
    if (extra := values.extra(limits, PATH)) is not None:
        schema, least, most = extra
        member = write(None, schema, f"{PATH}.additionalProperties")
        return _any_number(_assert_form(member), least, most, comma)
    found: list[tuple[Form, bool]] = []
    for name, schema, required in values.members(limits, PATH):
        member = write(name, schema, f"{PATH}.properties.{name}")
        if member is not None:
            found.append((member, required))
        elif required:
            values.schemas.refuse(PATH, name, "is no name that this format can write")
    if comma is not None:
        return values.listed(found, comma)
    return sequence(*(form if required else optional(form) for form, required in found))


def _any_number(member: Form, least: int, most: int | None, comma: Form | None) -> Form:
    if comma is None:
        return Repeat(member, least, most)
    more = Repeat(sequence(comma, member), 0, most and most - 1)
    some = sequence(member, LiteralForm("") if most == 1 else more)
    return some if least else optional(some)


def _assert_form(form: Form | None) -> Form:
    assert form is not None, "without a name, every argument can be written"
    return form
