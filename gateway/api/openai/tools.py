"""Resolves tools, tool_choice and parallel_tool_calls into a ToolPlan.

An empty list of tools means no tools, because SDKs send it so. With `tool_choice` "none" the
prompt has no tools, and the answer is not parsed for calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from gateway.api.openai.requests import BatchBody, ChatBody
from gateway.formats.event_builder import DeclaredTool
from protocol.errors import InvalidRequest

Mode = Literal["none", "auto", "required", "named"]
MODES = ("none", "auto", "required")
CHOICE_TYPES = ("function", "allowed_tools")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class ToolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a request, and which calls its answer may or must make.

    shown     the tools for the chat template
    declared  the same tools for the parser
    mode      how calls are chosen; with "none" the answer is not parsed for calls
    name      the tool that must be called, with mode "named"
    allowed   names of the callable tools; None: all. The prompt has the others too, so that
              prompts share a prefix
    many      more than one call is allowed
    strict    names of the tools whose arguments must match their schema
    """

    shown: Sequence[Mapping[str, Any]] = ()
    declared: Sequence[DeclaredTool] = ()
    mode: Mode = "none"
    name: str | None = None
    allowed: frozenset[str] | None = None
    many: bool = True
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
    """Return the plan of a body. Raise InvalidRequest naming the field."""
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
        many=body.parallel_tool_calls is not False,
        strict=frozenset(n for n, tool in zip(names, tools, strict=True) if _is_strict(tool)),
    )


def _check_unique(names: Sequence[str]) -> None:
    seen: set[str] = set()
    for place, name in enumerate(names):
        if name in seen:
            at = f"tools[{place}].function.name"
            raise InvalidRequest(f"{at}: another tool has the name {name!r} too", param=at)
        seen.add(name)


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return bool(tool["function"].get("strict"))


def _declared(tool: Any, at: str) -> DeclaredTool:
    if not isinstance(tool, Mapping):
        raise InvalidRequest(f"{at}: must be an object", param=at)
    if tool.get("type", "function") != "function":
        raise InvalidRequest(
            f"{at}.type: must be 'function'; got {tool['type']!r}{instead_of(tool['type'])}",
            param=f"{at}.type",
        )
    function = tool.get("function")
    at = f"{at}.function"
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{at}: must be an object", param=at)
    return DeclaredTool(_name(function, at), _parameters(function, at))


def _name(function: Mapping[str, Any], at: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{at}.name: must be 1 to 128 characters of A-Z a-z 0-9 _ . : / -; got {name!r}",
            param=f"{at}.name",
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
            raise InvalidRequest(f"{at}.{field}: must be {words}", param=f"{at}.{field}")
    parameters = function.get("parameters")
    if parameters and parameters.get("type", "object") != "object":
        raise InvalidRequest(
            f"{at}.parameters.type: must be 'object', because arguments have names",
            param=f"{at}.parameters.type",
        )
    return parameters


def instead_of(kind: Any) -> str:
    """Return a hint for an unsupported tool type, or ""."""
    if kind == "custom":
        return "; use a function with one string parameter instead"
    return ""


def _choice(choice: Any, names: Sequence[str]) -> tuple[Mode, Sequence[str]]:
    """Return (mode, names of the callable tools)."""
    if choice is None or choice == "auto":
        return ("auto", names) if names else ("none", ())
    if choice == "none":
        return "none", ()
    if choice == "required":
        _need_tools(names)
        return "required", names
    kind = choice.get("type", "function") if isinstance(choice, Mapping) else None
    if kind not in CHOICE_TYPES:
        raise InvalidRequest(
            f"tool_choice: must be one of {', '.join(MODES)}, or an object of type "
            f"{' or '.join(CHOICE_TYPES)}",
            param="tool_choice",
        )
    _need_tools(names)
    if kind == "allowed_tools":
        return _allowed(choice.get("allowed_tools"), names)
    return "named", [_named(choice, names, "tool_choice")]


def _need_tools(names: Sequence[str]) -> None:
    if not names:
        raise InvalidRequest("tool_choice: the request has no tools to call", param="tool_choice")


def _allowed(value: Any, names: Sequence[str]) -> tuple[Mode, Sequence[str]]:
    at = "tool_choice.allowed_tools"
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{at}: must be an object with mode and tools", param=at)
    mode, tools = value.get("mode"), value.get("tools")
    if mode != "auto" and mode != "required":
        raise InvalidRequest(
            f"{at}.mode: must be auto or required; got {mode!r}", param=f"{at}.mode"
        )
    if not isinstance(tools, list) or not tools:
        raise InvalidRequest(f"{at}.tools: must be a non-empty list", param=f"{at}.tools")
    return mode, [_allowed_tool(tool, names, f"{at}.tools[{n}]") for n, tool in enumerate(tools)]


def _allowed_tool(tool: Any, names: Sequence[str], at: str) -> str:
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise InvalidRequest(f"{at}.type: must be 'function'; got {kind!r}", param=f"{at}.type")
    return _named(tool, names, at)


def _named(choice: Mapping[str, Any], names: Sequence[str], at: str) -> str:
    at = f"{at}.function.name"
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in names:
        raise InvalidRequest(f"{at}: must be one of {', '.join(names)}; got {name!r}", param=at)
    return name
