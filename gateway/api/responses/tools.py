"""Translates the tools of a Responses request into those of a chat, and says how calls of each are
written as items.

| tool | in the chat | item of a call |
|---|---|---|
| function | the function | function_call |
| function of a namespace | a function `NAMESPACE__NAME` | function_call with `namespace` |
| custom | the custom tool | custom_tool_call |
| local_shell, shell, apply_patch, tool_search | a function of this name | shell_call and so on |

The client executes all of these. Tools that only OpenAI's service runs are left out.

A tool whose loading is deferred is not shown to the model until the client has loaded it, in answer
to a `tool_search`. It is then described in that answer, so the start of the prompt stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from gateway.api.openai.tools import is_hosted
from gateway.http.json_values import as_object
from gateway.prompt.content import to_json
from protocol.wire.errors import InvalidRequest
from protocol.wire.field_words import one_of

BETWEEN = "__"
"""Joins the names of a namespace and of a tool in it."""
CallKind = Literal[
    "function_call",
    "custom_tool_call",
    "local_shell_call",
    "shell_call",
    "apply_patch_call",
    "tool_search_call",
]
_FUNCTION_MEMBERS = ("name", "description", "parameters", "strict")
_CUSTOM_MEMBERS = ("name", "description", "format")
_SILENT_MEMBERS = ("type", "defer_loading")
TYPES = (
    *("function", "custom", "namespace"),
    *("local_shell", "shell", "apply_patch", "tool_search"),
)


class ToolShape(msgspec.Struct, frozen=True):
    """How calls of a tool are written as items. `name` is the tool's name in the request."""

    kind: CallKind
    name: str
    namespace: str | None = None


class ResponseTools(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a request, translated.

    chat      the tools of the chat; None if there are none
    shown     those of them that the start of the prompt describes
    shapes    name of a tool in the chat -> how its calls are written
    paths     path prefix in the chat -> path prefix in the client's request
    ignored   paths of tools and of their members that have no effect
    """

    chat: list[dict[str, Any]] | None
    shown: list[dict[str, Any]]
    shapes: Mapping[str, ToolShape]
    paths: Mapping[str, str]
    ignored: list[str]

    def shape(self, name: str) -> ToolShape:
        """Return how calls of a tool of the chat are written; as functions if it is unknown."""
        return self.shapes.get(name) or ToolShape("function_call", name)


NO_TOOLS = ResponseTools(chat=None, shown=[], shapes={}, paths={}, ignored=[])


def qualified(namespace: Any, name: str) -> str:
    """Return the name in the chat of a tool of a namespace; of any other tool if it is None."""
    return f"{namespace}{BETWEEN}{name}" if namespace else name


def response_tools(
    tools: Sequence[Any] | None, loaded: Sequence[tuple[Sequence[Any], str]] = ()
) -> ResponseTools:
    """Translate the tools of a request. `loaded` has the tools that items of the conversation
    added, with the path of each list. Raise InvalidRequest, naming the path, for a tool of an
    unknown type or form."""
    own = _Translation(searches=any(map(_is_client_search, tools or ())))
    for place, tool in enumerate(tools or ()):
        own.add(tool, f"tools[{place}]")
    later = _Translation(searches=False)
    for added, at in loaded:
        for place, tool in enumerate(added):
            later.add(tool, f"{at}[{place}]")
    named = {each.name for each in own.tools}
    latest = {each.name: each for each in later.tools if each.name not in named}
    places = [*own.tools, *latest.values()]
    return ResponseTools(
        chat=[each.chat for each in places] if places or tools is not None else None,
        shown=[each.chat for each in own.tools],
        shapes={each.name: each.shape for each in (*own.deferred, *places)},
        paths=_paths(places),
        ignored=own.ignored,
    )


class _ChatTool(msgspec.Struct, frozen=True):
    """A tool of the chat, its shape, and its path in the request."""

    chat: dict[str, Any]
    shape: ToolShape
    at: str

    @property
    def name(self) -> str:
        return str(self.chat[self.chat["type"]].get("name"))


class _Translation:
    """Collects the tools of one list. `searches` is whether the client searches for tools."""

    def __init__(self, *, searches: bool) -> None:
        self.tools: list[_ChatTool] = []
        #: Tools that the client has not loaded.
        self.deferred: list[_ChatTool] = []
        self.ignored: list[str] = []
        self._searches = searches

    def add(self, tool: Any, at: str) -> None:
        tool = as_object(tool, at)
        kind = tool.get("type")
        if is_hosted(tool) or _runs_elsewhere(tool):
            self.ignored.append(at)
            return
        if kind == "namespace":
            self._add_namespace(tool, at)
        elif isinstance(kind, str) and kind in _BUILT_IN:
            self.tools.append(_built_in(tool, at))
        elif kind in ("function", "custom"):
            self._add_named(tool, at)
        else:
            raise InvalidRequest.wrong(f"{at}.type", one_of(TYPES), kind)

    def _add_namespace(self, tool: Mapping[str, Any], at: str) -> None:
        name, description, tools = tool.get("name"), tool.get("description"), tool.get("tools")
        if not isinstance(name, str) or not name:
            raise InvalidRequest.wrong(f"{at}.name", "a string that is not empty", name)
        if description is not None and not isinstance(description, str):
            raise InvalidRequest.wrong(f"{at}.description", "a string", description)
        if not isinstance(tools, list):
            raise InvalidRequest.wrong(f"{at}.tools", "a list of tools", tools)
        about = f"Tools of {name}: {description}" if description else ""
        for place, inner in enumerate(tools):
            inside = f"{at}.tools[{place}]"
            inner = as_object(inner, inside)
            kind, kinds = inner.get("type"), ("function", "custom")
            if kind not in kinds:
                raise InvalidRequest.wrong(f"{inside}.type", one_of(kinds), kind)
            shown = self._add_named(inner, inside, namespace=name, about=about)
            about = "" if shown else about

    def _add_named(
        self, tool: Mapping[str, Any], at: str, *, namespace: str | None = None, about: str = ""
    ) -> bool:
        """Add a function or a custom tool. Return whether it is shown to the model.

        about  the description of the namespace, if this is the first of its tools
        """
        kind = tool["type"]
        known = _FUNCTION_MEMBERS if kind == "function" else _CUSTOM_MEMBERS
        for member, value in tool.items():
            if member not in known and member not in _SILENT_MEMBERS and value is not None:
                self.ignored.append(f"{at}.{member}")
        own = {name: tool[name] for name in known if tool.get(name) is not None}
        name = own.get("name")
        if isinstance(name, str):  # else the chat refuses it
            own["name"] = qualified(namespace, name)
        if about:
            own["description"] = "\n\n".join(filter(None, (about, own.get("description"))))
        if "format" in own:
            own["format"] = _chat_format(own["format"])
        shape: CallKind = "function_call" if kind == "function" else "custom_tool_call"
        made = _ChatTool({"type": kind, kind: own}, ToolShape(shape, str(name), namespace), at)
        waits = self._searches and tool.get("defer_loading") is True
        (self.deferred if waits else self.tools).append(made)
        return not waits


def _chat_format(format: Any) -> Any:
    """Return a custom tool's format in the shape of the chat API, in which a nested `grammar` has
    the syntax and the definition."""
    if not isinstance(format, Mapping) or format.get("type") != "grammar":
        return format
    return {"type": "grammar", "grammar": {k: v for k, v in format.items() if k != "type"}}


def _paths(tools: Sequence[_ChatTool]) -> dict[str, str]:
    paths: dict[str, str] = {}
    for place, tool in enumerate(tools):
        own = f"tools[{place}]"
        kind = tool.chat["type"]
        paths |= {own: tool.at, f"{own}.{kind}": tool.at}
        paths[f"{own}.custom.format.grammar"] = f"{tool.at}.format"
    return paths


# ---- tools that the client executes, and whose form the API defines


def _schema(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_STRINGS = {"type": "array", "items": {"type": "string"}}
_MILLISECONDS = {"type": "integer", "description": "The time limit in milliseconds."}
_LOCAL_SHELL = _schema(
    ["command"],
    command={**_STRINGS, "description": 'The program and its arguments: ["ls", "-l"].'},
    working_directory={"type": "string"},
    timeout_ms=_MILLISECONDS,
)
_SHELL = _schema(
    ["commands"],
    commands={**_STRINGS, "description": "Commands for a shell, run one after the other."},
    timeout_ms=_MILLISECONDS,
    max_output_length={"type": "integer", "description": "Most characters of output."},
)
_APPLY_PATCH = _schema(
    ["type", "path"],
    type={"enum": ["create_file", "update_file", "delete_file"]},
    path={"type": "string", "description": "The path of the file."},
    diff={
        "type": "string",
        "description": "What to change, as a diff without file headers: lines that start with "
        "'+', '-' or a blank, after a line '@@' with the context. Not for delete_file.",
    },
)
_BUILT_IN: Mapping[str, tuple[CallKind, str, dict[str, Any]]] = {
    "local_shell": ("local_shell_call", "Runs a program on the user's machine.", _LOCAL_SHELL),
    "shell": ("shell_call", "Runs shell commands on the user's machine.", _SHELL),
    "apply_patch": ("apply_patch_call", "Creates, changes or deletes a file.", _APPLY_PATCH),
    "tool_search": (
        "tool_search_call",
        "Searches for further tools. Those that are found can be called afterwards.",
        _schema(["query"], query={"type": "string"}),
    ),
}
"""Type of a tool -> (item of its calls, description, schema of the arguments)."""


def _built_in(tool: Mapping[str, Any], at: str) -> _ChatTool:
    name = str(tool["type"])
    shape, description, parameters = _BUILT_IN[name]
    if name == "tool_search":  # the client describes what it searches
        description = tool.get("description") or description
        parameters = tool.get("parameters") or parameters
    function: dict[str, Any] = {"name": name}
    function |= {"description": description, "parameters": parameters}
    if name != "tool_search":
        function["strict"] = True  # the items have no place for other arguments
    return _ChatTool({"type": "function", "function": function}, ToolShape(shape, name), at)


def _is_client_search(tool: Any) -> bool:
    is_search = isinstance(tool, Mapping) and tool.get("type") == "tool_search"
    return is_search and tool.get("execution") == "client"


def _runs_elsewhere(tool: Mapping[str, Any]) -> bool:
    """Return whether OpenAI's service runs a tool that clients may run, too: a shell in a
    container, or a search that it makes itself."""
    if tool.get("type") == "tool_search":
        return tool.get("execution") != "client"
    environment = tool.get("environment")
    kind = environment.get("type") if isinstance(environment, Mapping) else "local"
    return tool.get("type") == "shell" and kind != "local"


# ---- what an item says


def described_tools(tools: Sequence[Any], at: str) -> str:
    """Return the text that tells the model of tools that a client has loaded."""
    found = response_tools(tools)
    lines = [to_json(tool[tool["type"]]) for tool in found.chat or ()]
    if not lines:
        return "No tool was found."
    return "\n".join(("These tools can be called from now on:", *lines))


def loaded_tools(
    items: Iterable[tuple[Mapping[str, Any], str]],
) -> list[tuple[Sequence[Any], str]]:
    """Return the lists of tools that items of a conversation add, and the path of each."""
    return [
        (item["tools"], f"{at}.tools")
        for item, at in items
        if item["type"] in ("tool_search_output", "additional_tools")
    ]
