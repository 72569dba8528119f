"""tools, tool_choice, parallel_tool_calls -> what the template is shown and the answer is read for.

An empty list of tools is no tools, as SDKs send it. With `tool_choice` "none" the model is shown
none either, and nothing in its answer is taken for a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from gateway.openai.schema import BatchBody, ChatBody
from gateway.output.teller import DeclaredTool
from protocol.errors import InvalidRequest

Mode = Literal["none", "auto", "required", "named"]
MODES = ("none", "auto", "required")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class ToolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """shown     the tools as the template sees them; empty: none
    declared  the same, as the answer's readers see them
    mode      how calls are chosen; "none": nothing is read for calls
    name      the one tool to be called, with mode "named"
    many      more than one call is allowed
    strict    names of tools whose arguments must fit their schema
    """

    shown: Sequence[Mapping[str, Any]] = ()
    declared: Sequence[DeclaredTool] = ()
    mode: Mode = "none"
    name: str | None = None
    many: bool = True
    strict: frozenset[str] = frozenset()


def tool_plan(body: ChatBody | BatchBody) -> ToolPlan:
    """Raises InvalidRequest naming the field."""
    tools = body.tools or []
    declared = [_declared(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    names = [tool.name for tool in declared]
    _check_unique(names)
    mode, name = _choice(body.tool_choice, names)
    if mode == "none":
        return ToolPlan()
    return ToolPlan(
        shown=tools,
        declared=declared,
        mode=mode,
        name=name,
        many=body.parallel_tool_calls is not False,
        strict=frozenset(n for n, tool in zip(names, tools, strict=True) if _is_strict(tool)),
    )


def _check_unique(names: Sequence[str]) -> None:
    seen: set[str] = set()
    for place, name in enumerate(names):
        if name in seen:
            at = f"tools[{place}].function.name"
            raise InvalidRequest(f"{at}: there are two tools of the name {name!r}", param=at)
        seen.add(name)


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return bool(tool["function"].get("strict"))


def _declared(tool: Any, at: str) -> DeclaredTool:
    if not isinstance(tool, Mapping):
        raise InvalidRequest(f"{at} must be an object", param=at)
    if tool.get("type", "function") != "function":
        raise InvalidRequest(
            f"{at}.type must be 'function'; it is {tool['type']!r}", param=f"{at}.type"
        )
    function = tool.get("function")
    at = f"{at}.function"
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{at} must be an object", param=at)
    return DeclaredTool(_name(function, at), _parameters(function, at))


def _name(function: Mapping[str, Any], at: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{at}.name must be 1 to 128 letters, digits or any of _ - . : /; it is {name!r}",
            param=f"{at}.name",
        )
    return name


def _parameters(function: Mapping[str, Any], at: str) -> Mapping[str, Any] | None:
    for field, kind, words in (
        ("description", str, "a string"),
        ("strict", bool, "true or false"),
        ("parameters", Mapping, "a JSON schema, which is an object"),
    ):
        value = function.get(field)
        if value is not None and not isinstance(value, kind):
            raise InvalidRequest(f"{at}.{field} must be {words}", param=f"{at}.{field}")
    parameters = function.get("parameters")
    if parameters and parameters.get("type", "object") != "object":
        raise InvalidRequest(
            f"{at}.parameters.type must be 'object': arguments have names",
            param=f"{at}.parameters.type",
        )
    return parameters


def _choice(choice: Any, names: Sequence[str]) -> tuple[Mode, str | None]:
    if choice is None or choice == "auto":
        return ("auto", None) if names else ("none", None)
    if choice == "none":
        return "none", None
    if choice == "required":
        _need_tools(names)
        return "required", None
    if not isinstance(choice, Mapping) or choice.get("type", "function") != "function":
        raise InvalidRequest(
            f"tool_choice must be one of {', '.join(MODES)}, or an object that names a function",
            param="tool_choice",
        )
    _need_tools(names)
    return "named", _named(choice, names)


def _need_tools(names: Sequence[str]) -> None:
    if not names:
        raise InvalidRequest("tool_choice: there are no tools to call", param="tool_choice")


def _named(choice: Mapping[str, Any], names: Sequence[str]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in names:
        raise InvalidRequest(
            f"tool_choice.function.name must be one of {', '.join(names)}; it is {name!r}",
            param="tool_choice.function.name",
        )
    return name
