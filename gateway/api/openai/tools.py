"""Makes a ToolPlan from tools, tool_choice and parallel_tool_calls, and a grammar from the plan.

Some SDKs send an empty list of tools, which means no tools. With `tool_choice` "none" the prompt
has no tools, and the answer is not parsed for calls.

The grammar enforces the plan in the model's own tool format. A constraint that cannot be enforced
is refused with an InvalidRequest that names the field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal

import msgspec

from gateway.api.openai.requests import BatchBody, ChatBody
from gateway.api.openai.structured import check_keywords
from gateway.formats.event_builder import DeclaredTool
from gateway.formats.grammar_builder import NotWritable
from gateway.formats.registry import BoundFormat
from gateway.http.json_values import as_object
from protocol.engine.grammar import Body, Rules
from protocol.wire.errors import InvalidRequest

Mode = Literal["none", "auto", "required", "named"]
MODES = ("none", "auto", "required")
CHOICE_TYPES = ("function", "allowed_tools")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class ToolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a request, and the calls that its answer may or must contain."""

    #: The tools for the chat template.
    shown: Sequence[Mapping[str, Any]] = ()
    #: The same tools for the parser.
    declared: Sequence[DeclaredTool] = ()
    #: How the model chooses calls. With "none", the answer is not parsed for calls.
    mode: Mode = "none"
    #: The tool that must be called, with mode "named".
    name: str | None = None
    #: Names of the tools that may be called; None: all. The prompt has the other tools too, so that
    #: prompts with different choices share a prefix.
    allowed: frozenset[str] | None = None
    #: More than one call is allowed.
    allows_many: bool = True
    #: Names of the tools whose arguments must match their schema.
    strict: frozenset[str] = frozenset()

    @property
    def callable(self) -> list[DeclaredTool]:
        return [tool for tool in self.declared if self.may_call(tool.name)]

    def may_call(self, name: str) -> bool:
        return self.allowed is None or name in self.allowed

    @property
    def demands_call(self) -> bool:
        return self.mode in ("required", "named")

    @property
    def is_narrowed(self) -> bool:
        return self.allowed is not None and len(self.allowed) < len(self.declared)

    @property
    def is_enforced(self) -> bool:
        """Whether the plan requires a grammar."""
        return self.demands_call or self.is_narrowed or bool(self.strict)


def tool_plan(body: ChatBody | BatchBody) -> ToolPlan:
    """Return the plan for a request's tools and `tool_choice`. Raise InvalidRequest naming the
    field if one of them is invalid."""
    tools = body.tools or []
    declared = [_declared(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    names = [tool.name for tool in declared]
    _check_unique(names)
    mode, chosen = _choice(body.tool_choice, names)
    if mode == "none":
        return ToolPlan()
    return ToolPlan(
        shown=tools,
        declared=declared,
        mode=mode,
        name=chosen[0] if mode == "named" else None,
        allowed=frozenset(chosen),
        allows_many=body.parallel_tool_calls is not False,
        strict=frozenset(n for n, tool in zip(names, tools, strict=True) if _is_strict(tool)),
    )


def _check_unique(names: Sequence[str]) -> None:
    seen: set[str] = set()
    for place, name in enumerate(names):
        if name in seen:
            at = f"tools[{place}].function.name"
            raise InvalidRequest.at(at, f"another tool has the name {name!r} too")
        seen.add(name)


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return bool(tool["function"].get("strict"))


def _declared(tool: Any, at: str) -> DeclaredTool:
    tool = as_object(tool, at)
    if tool.get("type", "function") != "function":
        raise InvalidRequest.at(
            f"{at}.type", f"must be 'function'; got {tool['type']!r}{tool_type_hint(tool['type'])}"
        )
    at = f"{at}.function"
    function = as_object(tool.get("function"), at)
    return DeclaredTool(_name(function, at), _parameters(function, at))


def _name(function: Mapping[str, Any], at: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest.at(
            f"{at}.name", f"must be 1 to 128 characters of A-Z a-z 0-9 _ . : / -; got {name!r}"
        )
    return name


def _parameters(function: Mapping[str, Any], at: str) -> Mapping[str, Any] | None:
    for field, kind, words in (
        ("description", str, "a string"),
        ("strict", bool, "true or false"),
        ("parameters", Mapping, "a JSON Schema object"),
    ):
        value = function.get(field)
        if value is not None and not isinstance(value, kind):
            raise InvalidRequest.at(f"{at}.{field}", f"must be {words}")
    parameters = function.get("parameters")
    if parameters and parameters.get("type", "object") != "object":
        raise InvalidRequest.at(
            f"{at}.parameters.type", "must be 'object', because arguments have names"
        )
    return parameters


def tool_type_hint(kind: Any) -> str:
    """Return the end of an error about an unsupported tool type: advice, or ""."""
    if kind == "custom":
        return "; use a function with one string parameter instead"
    return ""


def _choice(choice: Any, names: Sequence[str]) -> tuple[Mode, Sequence[str]]:
    """Return (mode, names of the tools that may be called)."""
    if choice is None or choice == "auto":
        return ("auto", names) if names else ("none", ())
    if choice == "none":
        return "none", ()
    if choice == "required":
        _check_has_tools(names)
        return "required", names
    kind = choice.get("type", "function") if isinstance(choice, Mapping) else None
    if kind not in CHOICE_TYPES:
        raise InvalidRequest.at(
            "tool_choice",
            f"must be one of {', '.join(MODES)}, or an object of type {' or '.join(CHOICE_TYPES)}",
        )
    _check_has_tools(names)
    if kind == "allowed_tools":
        return _allowed(choice.get("allowed_tools"), names)
    return "named", [_named(choice, names, "tool_choice")]


def _check_has_tools(names: Sequence[str]) -> None:
    if not names:
        raise InvalidRequest.at("tool_choice", "the request has no tools to call")


def _allowed(value: Any, names: Sequence[str]) -> tuple[Mode, Sequence[str]]:
    at = "tool_choice.allowed_tools"
    if not isinstance(value, Mapping):
        raise InvalidRequest.at(at, "must be an object with mode and tools")
    mode, tools = value.get("mode"), value.get("tools")
    if mode != "auto" and mode != "required":
        raise InvalidRequest.at(f"{at}.mode", f"must be auto or required; got {mode!r}")
    if not isinstance(tools, list) or not tools:
        raise InvalidRequest.at(f"{at}.tools", "must be a non-empty list")
    return mode, [_allowed_tool(tool, names, f"{at}.tools[{n}]") for n, tool in enumerate(tools)]


def _allowed_tool(tool: Any, names: Sequence[str], at: str) -> str:
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise InvalidRequest.at(f"{at}.type", f"must be 'function'; got {kind!r}")
    return _named(tool, names, at)


def _named(choice: Mapping[str, Any], names: Sequence[str], at: str) -> str:
    at = f"{at}.function.name"
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in names:
        raise InvalidRequest.at(at, f"must be one of {', '.join(names)}; got {name!r}")
    return name


# ---- the grammar of calls


def tool_grammar(bound: BoundFormat | None, plan: ToolPlan) -> Body | None:
    """Return the grammar of the answer, or None if the answer may be any text. Raise
    InvalidRequest if the plan cannot be enforced."""
    if bound is None or not bound.format.has_calls:
        if plan.demands_call or plan.is_narrowed:
            problem = "required" if plan.demands_call else "restricted"
            raise InvalidRequest.at(
                "tool_choice",
                f"tool calls cannot be {problem}, because this model's tool format is "
                "unknown; set tool_choice to 'auto', or restart the server with --tool-format",
            )
        return None
    if not plan.is_enforced:
        return None
    names = {tool.name for tool in plan.declared} if plan.demands_call else plan.strict
    _check_schemas(plan, names)
    try:
        if plan.demands_call:
            return bound.required_calls(plan.callable, many=plan.allows_many)
        return bound.strict_calls(_callable_tools(plan), many=plan.allows_many)
    except NotWritable as error:
        raise _refusal(error, plan) from None


def calls_instead_of_form(bound: BoundFormat | None, plan: ToolPlan, form_field: str) -> Rules:
    """Return the grammar of the tool calls that the model may make instead of text that matches the
    field `form_field`. Raise InvalidRequest if the calls cannot be enforced."""
    if bound is None or not bound.format.has_calls:
        raise InvalidRequest.at(
            form_field,
            "cannot be combined with tools, because this model's tool format is "
            "unknown; set tool_choice to 'none', or restart the server with --tool-format",
        )
    _check_schemas(plan, plan.strict)
    try:
        return bound.required_calls_or_other(_callable_tools(plan), many=plan.allows_many)
    except NotWritable as error:
        raise _refusal(error, plan) from None


def _check_schemas(plan: ToolPlan, enforced: Set[str]) -> None:
    """Raise InvalidRequest for a schema keyword that cannot be enforced."""
    for place, tool in enumerate(plan.declared):
        if tool.name in enforced and plan.may_call(tool.name):
            at = f"tools[{place}].function.parameters"
            check_keywords(tool.parameters, at, strict=tool.name in plan.strict)


def _callable_tools(plan: ToolPlan) -> Sequence[DeclaredTool]:
    """Return the tools that may be called. Remove the schemas of tools that are not strict."""
    return [
        tool if tool.name in plan.strict else msgspec.structs.replace(tool, parameters=None)
        for tool in plan.callable
    ]


def _refusal(error: NotWritable, plan: ToolPlan) -> InvalidRequest:
    place = next(n for n, tool in enumerate(plan.declared) if tool.name == error.tool)
    at = f"tools[{place}].function.{error.field}"
    return InvalidRequest.at(at, f"{error}")
