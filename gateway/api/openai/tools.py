"""Makes a ToolPlan from tools, tool_choice and parallel_tool_calls, and a grammar from the plan.

A tool of type `custom` takes one text instead of named arguments. For the model it is a function
with the one argument `input`. If the tool has a grammar, in Lark or as a regular expression, the
argument's schema has it as a `pattern`, so it is enforced like any schema, in every tool format.

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
from gateway.formats.lark_pattern import lark_pattern, regex_pattern
from gateway.formats.lark_terminals import NotConvertible
from gateway.formats.registry import BoundFormat
from gateway.formats.text_argument import ARGUMENT
from gateway.http.json_values import as_object
from protocol.engine.grammar import Body, Rules
from protocol.wire.errors import InvalidRequest
from protocol.wire.field_words import one_of

Mode = Literal["none", "auto", "required", "named"]
MODES = ("none", "auto", "required")
CHOICE_TYPES = ("function", "custom", "allowed_tools")
TOOL_TYPES = ("function", "custom")
HOSTED_TOOLS = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "mcp"),
    *("computer", "programmatic_tool_calling"),
)
"""Beginnings of the types of tools that only OpenAI's service runs: `web_search_preview`. They are
left out, because an agent sends them to every server and works without them."""
SYNTAXES = {"lark": lark_pattern, "regex": regex_pattern}
"""Syntax of a custom tool's grammar -> function that returns its regular expression."""
MAX_GRAMMAR_CHARS = 64 << 10
"""Most characters in a custom tool's grammar."""
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
    #: Paths of the tools in the request, in the order of `declared`: `tools[0].function`.
    paths: Sequence[str] = ()
    #: The field that an error names if the engine refuses a tool's schema or grammar. It does not
    #: report which one it refused. So if there are several tools, this is the whole list.
    schema_field: str = "tools"
    #: Paths of tools without effect, because only another service runs them.
    ignored: Sequence[str] = ()

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


def tool_plan(
    body: ChatBody | BatchBody, shown_tools: Sequence[Mapping[str, Any]] | None = None
) -> ToolPlan:
    """Return the plan for a request's tools and `tool_choice`. Raise InvalidRequest naming the
    field if one of them is invalid.

    shown_tools  the tools that the template receives; None: those of the body
    """
    given = {f"tools[{place}]": tool for place, tool in enumerate(body.tools or [])}
    ignored = tuple(at for at, tool in given.items() if is_hosted(tool))
    tools = [_tool(tool, at) for at, tool in given.items() if at not in ignored]
    names = [tool.declared.name for tool in tools]
    _check_unique(tools)
    mode, chosen = _choice(body.tool_choice, names)
    if mode == "none":
        return ToolPlan(ignored=ignored)
    return ToolPlan(
        shown=[tool.shown for tool in tools] if shown_tools is None else _shown(shown_tools),
        declared=[tool.declared for tool in tools],
        mode=mode,
        name=chosen[0] if mode == "named" else None,
        allowed=frozenset(chosen),
        allows_many=body.parallel_tool_calls is not False,
        strict=frozenset(name for name, tool in zip(names, tools, strict=True) if tool.is_strict),
        paths=[tool.at for tool in tools],
        schema_field=tools[0].schema_at if len(tools) == 1 else "tools",
        ignored=ignored,
    )


def _shown(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return tools as the template receives them. The answer may call some of them only."""
    return [_tool(tool, "tools").shown for tool in tools if not is_hosted(tool)]


def is_hosted(tool: Any) -> bool:
    """Return whether a tool is one that OpenAI's or Anthropic's service runs itself."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return isinstance(kind, str) and kind.startswith(HOSTED_TOOLS)


class _Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of a request, checked.

    shown      the tool for the chat template
    declared   the tool for the parser and the grammar
    at         path of the member that describes the tool, such as `tools[0].function`
    is_strict  whether its arguments must match their schema
    """

    shown: Mapping[str, Any]
    declared: DeclaredTool
    at: str
    is_strict: bool

    @property
    def schema_at(self) -> str:
        """The path of what restricts its arguments."""
        is_text = self.declared.takes_text
        return f"{self.at}.{'format.grammar.definition' if is_text else 'parameters'}"


def _check_unique(tools: Sequence[_Tool]) -> None:
    seen: set[str] = set()
    for tool in tools:
        name = tool.declared.name
        if name in seen:
            raise InvalidRequest.at(f"{tool.at}.name", f"another tool has the name {name!r} too")
        seen.add(name)


def _tool(tool: Any, at: str) -> _Tool:
    tool = as_object(tool, at)
    kind = tool.get("type", "function")
    if kind not in TOOL_TYPES:
        raise InvalidRequest.wrong(f"{at}.type", one_of(("function", "custom")), kind)
    at = f"{at}.{kind}"
    member = as_object(tool.get(kind), at)
    if kind == "custom":
        return _custom_tool(member, at)
    return _Tool(
        shown=tool,
        declared=DeclaredTool(_name(member, at), _parameters(member, at)),
        at=at,
        is_strict=bool(member.get("strict")),
    )


# ---- custom tools


def _custom_tool(custom: Mapping[str, Any], at: str) -> _Tool:
    name, description = _name(custom, at), custom.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest.wrong(f"{at}.description", "a string", description)
    grammar = _custom_grammar(custom.get("format"), f"{at}.format")
    words = [description] if description else []
    limits: dict[str, Any] = {}
    if grammar is not None:
        limits = {"pattern": f"^(?:{grammar.pattern})$"}
        words.append(f"The text must match this grammar ({grammar.syntax}):\n{grammar.source}")
    function = {
        "name": name,
        "description": "\n\n".join(words),
        "parameters": _text_schema(description="The whole text."),
    }
    declared = DeclaredTool(name, _text_schema(**limits), takes_text=True)
    return _Tool(
        shown={"type": "function", "function": function},
        declared=declared,
        at=at,
        is_strict=grammar is not None,
    )


def _text_schema(**members: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {ARGUMENT: {"type": "string", **members}},
        "required": [ARGUMENT],
        "additionalProperties": False,
    }


class _TextGrammar(msgspec.Struct, frozen=True):
    """The grammar of a custom tool's text, and the regular expression that enforces it."""

    syntax: str
    source: str
    pattern: str


def _custom_grammar(format: Any, at: str) -> _TextGrammar | None:
    """Return the grammar of a custom tool's `format`; None if any text is allowed."""
    if format is None:
        return None
    format = as_object(format, at)
    kind = format.get("type")
    if kind == "text":
        return None
    if kind != "grammar":
        raise InvalidRequest.wrong(f"{at}.type", one_of(("text", "grammar")), kind)
    at = f"{at}.grammar"
    grammar = as_object(format.get("grammar"), at)
    syntax, source = grammar.get("syntax"), grammar.get("definition")
    if not isinstance(syntax, str) or syntax not in SYNTAXES:
        raise InvalidRequest.wrong(f"{at}.syntax", one_of(SYNTAXES), syntax)
    at = f"{at}.definition"
    if not isinstance(source, str) or not 0 < len(source) <= MAX_GRAMMAR_CHARS:
        words = f"a string of 1 to {MAX_GRAMMAR_CHARS:,} characters"
        raise InvalidRequest.wrong(at, words, source)
    try:
        return _TextGrammar(syntax, source, SYNTAXES[syntax](source))
    except NotConvertible as error:
        raise InvalidRequest.at(at, f"cannot be enforced: {error}") from None


# ---- names and schemas


def _name(function: Mapping[str, Any], at: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        words = "a string of 1 to 128 characters of A-Z a-z 0-9 _ . : / -"
        raise InvalidRequest.wrong(f"{at}.name", words, name)
    return name


def _parameters(function: Mapping[str, Any], at: str) -> Mapping[str, Any] | None:
    for field, kind, words in (
        ("description", str, "a string"),
        ("strict", bool, "true or false"),
        ("parameters", Mapping, "a JSON Schema object"),
    ):
        value = function.get(field)
        if value is not None and not isinstance(value, kind):
            raise InvalidRequest.wrong(f"{at}.{field}", words, value)
    parameters = function.get("parameters")
    if parameters and parameters.get("type", "object") != "object":
        words = f"{one_of(('object',))}, because arguments have names"
        raise InvalidRequest.wrong(f"{at}.parameters.type", words, parameters["type"])
    return parameters


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
        words = f"{one_of(MODES)}, or an object whose type is {one_of(CHOICE_TYPES)}"
        raise InvalidRequest.wrong("tool_choice", words, choice)
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
        raise InvalidRequest.wrong(at, "an object with mode and tools", value)
    mode, tools = value.get("mode"), value.get("tools")
    if mode != "auto" and mode != "required":
        raise InvalidRequest.wrong(f"{at}.mode", one_of(("auto", "required")), mode)
    if not isinstance(tools, list) or not tools:
        raise InvalidRequest.wrong(f"{at}.tools", "a list of at least 1 item", tools)
    return mode, [_allowed_tool(tool, names, f"{at}.tools[{n}]") for n, tool in enumerate(tools)]


def _allowed_tool(tool: Any, names: Sequence[str], at: str) -> str:
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    if kind not in TOOL_TYPES:
        raise InvalidRequest.wrong(f"{at}.type", one_of(("function", "custom")), kind)
    return _named(tool, names, at)


def _named(choice: Mapping[str, Any], names: Sequence[str], at: str) -> str:
    kind = choice.get("type", "function")
    at = f"{at}.{kind}.name"
    member = choice.get(kind)
    name = member.get("name") if isinstance(member, Mapping) else None
    if not isinstance(name, str) or name not in names:
        raise InvalidRequest.wrong(at, one_of(names), name)
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
    for tool, at in zip(plan.declared, plan.paths, strict=True):
        if tool.name in enforced and plan.may_call(tool.name):
            check_keywords(tool.parameters, f"{at}.parameters", strict=tool.name in plan.strict)


def _callable_tools(plan: ToolPlan) -> Sequence[DeclaredTool]:
    """Return the tools that may be called. Remove the schemas of tools that are not strict."""
    return [
        tool if tool.name in plan.strict else msgspec.structs.replace(tool, parameters=None)
        for tool in plan.callable
    ]


def _refusal(error: NotWritable, plan: ToolPlan) -> InvalidRequest:
    place = next(n for n, tool in enumerate(plan.declared) if tool.name == error.tool)
    at, field = plan.paths[place], error.field
    if plan.declared[place].takes_text and field != "name":
        field = "format.grammar.definition"
    return InvalidRequest.at(f"{at}.{field}", f"{error}")
