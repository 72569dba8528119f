"""The grammar that enforces a request's tools and tool_choice, in the model's own tool format.

A constraint that cannot be enforced is refused: InvalidRequest names the field.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import msgspec

from gateway.api.openai.schema_keywords import check_keywords
from gateway.api.openai.tools import ToolPlan
from gateway.formats.calls_grammar import required, required_or_other, strict
from gateway.formats.event_builder import DeclaredTool
from gateway.formats.grammar_builder import NotWritable
from gateway.formats.registry import BoundFormat
from protocol.errors import InvalidRequest
from protocol.grammar import Body, Rules


def tool_grammar(bound: BoundFormat | None, plan: ToolPlan) -> Body | None:
    """Return the grammar of the answer, or None if it may be any text."""
    if bound is None or not bound.format.has_calls:
        if plan.demands_call or plan.is_narrowed:
            problem = "required" if plan.demands_call else "restricted"
            raise InvalidRequest(
                f"tool_choice: tool calls cannot be {problem}, because this model's tool format is "
                "unknown; set tool_choice to 'auto', or restart the server with --tool-format",
                param="tool_choice",
            )
        return None
    if not plan.is_enforced:
        return None
    names = {tool.name for tool in plan.declared} if plan.demands_call else plan.strict
    _check_schemas(plan, names)
    try:
        if plan.demands_call:
            return required(bound, plan.callable, many=plan.many)
        return strict(bound, _loosened(plan), many=plan.many)
    except NotWritable as error:
        raise _refusal(error, plan) from None


def calls_instead(bound: BoundFormat | None, plan: ToolPlan, form_field: str) -> Rules:
    """Return the grammar of the calls that are allowed instead of the form set by `form_field`."""
    if bound is None or not bound.format.has_calls:
        raise InvalidRequest(
            f"{form_field}: cannot be combined with tools, because this model's tool format is "
            "unknown; set tool_choice to 'none', or restart the server with --tool-format",
            param=form_field,
        )
    _check_schemas(plan, plan.strict)
    try:
        return required_or_other(bound, _loosened(plan), many=plan.many)
    except NotWritable as error:
        raise _refusal(error, plan) from None


def _check_schemas(plan: ToolPlan, enforced: Set[str]) -> None:
    """Raise InvalidRequest for a schema keyword that cannot be enforced."""
    for place, tool in enumerate(plan.declared):
        if tool.name in enforced and plan.may_call(tool.name):
            at = f"tools[{place}].function.parameters"
            check_keywords(tool.parameters, at, strict=tool.name in plan.strict)


def _loosened(plan: ToolPlan) -> Sequence[DeclaredTool]:
    """Return the callable tools, without the schemas of those that are not strict."""
    return [
        tool if tool.name in plan.strict else msgspec.structs.replace(tool, parameters=None)
        for tool in plan.callable
    ]


def _refusal(error: NotWritable, plan: ToolPlan) -> InvalidRequest:
    place = next(n for n, tool in enumerate(plan.declared) if tool.name == error.tool)
    at = f"tools[{place}].function.{error.field}"
    return InvalidRequest(f"{at}: {error}", param=at)
