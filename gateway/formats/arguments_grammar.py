"""The grammar of a tool's arguments, in any syntax: named members, some of them optional."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.formats.grammar_forms import either, optional, sequence
from gateway.formats.schema_cases import Schemas
from gateway.formats.value_syntax import Values
from protocol.grammar import Form, LiteralForm, Repeat

PATH = "parameters"

ArgumentWriter = Callable[[str | None, Any, str], Form | None]
"""(name, schema, path) -> the form of one argument, or None if the format cannot write the name.

The name None stands for any undeclared name; the schema is then that of its value.
"""


def arguments_form(values: Values, write: ArgumentWriter, comma: Form | None = None) -> Form:
    """Return the form of all arguments of one call, in the schema's order."""
    schemas = values.schemas
    return either(
        _members(values, case.limits, write, comma)
        for case in schemas.cases(schemas.root, PATH)
        if case.kind == "object" or _refuse_kind(schemas)
    )


def _refuse_kind(schemas: Schemas) -> bool:
    """Refuse parameters whose declared type is not an object. Without a type they are taken as
    an object.
    """
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
            values.schemas.refuse(PATH, name, "is a name that this format cannot write")
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
    assert form is not None, "every format can write arguments of any name"
    return form
