"""The tools of a Messages request: which ones the model may call, and where it reads about them.

- Tools that Anthropic's servers run, such as `web_search_20250305`, are left out, with a warning.
- A tool with `defer_loading` is offered once a `tool_reference` or a `tool_addition` in the
  messages names it. Its definition is then a text at that place of the conversation, so the start
  of the prompt, which may be cached, stays the same.
- `tool_removal` withdraws a tool. The start of the prompt keeps its definition for the same reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gateway.api.openai.requests import MAX_TOOLS
from gateway.formats.events import OutputWarning
from gateway.http.json_values import as_object
from gateway.prompt.content import to_json
from protocol.wire.errors import InvalidRequest
from protocol.wire.field_words import one_of

TOOL_LEFT_OUT = "tool_left_out"
"""Code of the warning about a tool or a connection that this server does not have."""
SEARCH = "tool_search_tool_"
"""Start of the types of the tools with which Anthropic's servers load deferred tools."""
REFERENCES = ("mcp_tool_reference", "mcp_toolset_reference")
"""Types of references to tools of MCP servers, to which this server does not connect."""


ToolState = Literal["deferred", "offered", "withdrawn"]


@dataclass(slots=True)
class OfferedTool:
    """One tool of a request."""

    name: Any  # checked with the chat
    #: The tool as a chat has it.
    chat: dict[str, Any]
    #: The path of its definition in the client's request.
    at: str
    #: Whether the model may call it. It has not been offered yet if it is "deferred".
    state: ToolState
    #: Whether the start of the prompt has its definition.
    is_at_start: bool

    @classmethod
    def of(cls, tool: Mapping[str, Any], at: str, *, is_deferred: bool) -> OfferedTool:
        """Return the tool that the client defines at the path `at`."""
        schema = as_object(tool.get("input_schema"), f"{at}.input_schema")
        function = {"name": tool.get("name"), "parameters": schema}
        given = {
            name: tool[name] for name in ("description", "strict") if tool.get(name) is not None
        }
        return cls(
            name=tool.get("name"),
            chat={"type": "function", "function": function | given},
            at=at,
            state="deferred" if is_deferred else "offered",
            is_at_start=not is_deferred,
        )


class ConversationTools:
    """The tools that a conversation offers, from its start or from a later message on. The methods
    that change them return the words that the model reads at that place.

    Raises InvalidRequest, naming the path, if a tool is invalid.
    """

    def __init__(self, tools: Sequence[Any] | None) -> None:
        #: Paths of the tools that are left out.
        self.ignored: list[str] = []
        self.warnings: list[OutputWarning] = []
        self._tools: list[OfferedTool] = []
        #: The tool that has each name now: the one defined last. There can be many calls and tools.
        self._by_name: dict[str, OfferedTool] = {}
        #: Name -> type of the tools that are left out.
        self._left_out: dict[str, str] = {}
        places = [
            (as_object(tool, f"tools[{i}]"), f"tools[{i}]") for i, tool in enumerate(tools or ())
        ]
        # Nothing else loads tools if the client relies on the search of Anthropic's servers.
        may_defer = not any(str(tool.get("type")).startswith(SEARCH) for tool, _ in places)
        for tool, at in places:
            if self._leaves_out(tool, at):
                self.ignored.append(at)
                continue
            is_deferred = _flag(tool, "defer_loading", at) and may_defer
            self._add(OfferedTool.of(tool, at, is_deferred=is_deferred))

    def _add(self, tool: OfferedTool) -> None:
        self._tools.append(tool)
        if isinstance(tool.name, str):
            self._by_name[tool.name] = tool

    def _leaves_out(self, tool: Mapping[str, Any], at: str) -> bool:
        """Leave a tool of Anthropic's own out, with a warning. Return whether it is one."""
        kind = tool.get("type")
        if kind in (None, "custom"):
            return False
        self._left_out[str(tool.get("name"))] = str(kind)
        problem = f"left out, because {_not_run(kind)}"
        self.warnings.append(OutputWarning(TOOL_LEFT_OUT, f"{at}: {problem}"))
        return True

    def check_not_left_out(self, name: str | None = None) -> None:
        """Raise InvalidRequest if the answer must call the tool `name`, which is left out. None:
        it must call any tool, and there is none that is not left out."""
        if name is None:
            if self._left_out and not self.offered:
                kind = next(iter(self._left_out.values()))
                raise InvalidRequest.at("tool_choice", _not_run(kind))
        elif name in self._left_out and name not in self._by_name:
            raise InvalidRequest.at("tool_choice.name", _not_run(self._left_out[name]))

    # ---- the messages, in order

    def on_reference(self, name: str) -> str:
        """Offer a tool that the result of a search names."""
        tool = self._by_name.get(name)
        if tool is None:
            return f"The tool {name} is available now."
        return self._offer(tool)

    def on_addition(self, tool: Any, at: str) -> str:
        """Offer the `tool` of a tool_addition block: a reference, or a definition."""
        tool = as_object(tool, at)
        kind = tool.get("type")
        if kind == "tool_reference":
            return self.on_reference(_name(tool, at))
        if kind in REFERENCES:
            return self._without_mcp(at)
        if kind != "tool_definition":
            known = ("tool_reference", "tool_definition", *REFERENCES)
            raise InvalidRequest.wrong(f"{at}.type", one_of(known), kind)
        at = f"{at}.definition"
        definition = as_object(tool.get("definition"), at)
        if self._leaves_out(definition, at):
            return ""
        if len(self._tools) >= MAX_TOOLS:
            raise InvalidRequest.at(at, f"a request can have at most {MAX_TOOLS} tools")
        added = OfferedTool.of(definition, at, is_deferred=True)
        self._withdraw(added.name)
        self._add(added)
        return self._offer(added)

    def on_removal(self, tool: Any, at: str) -> str:
        """Withdraw the `tool` of a tool_removal block, which is a reference."""
        tool = as_object(tool, at)
        kind = tool.get("type")
        if kind in REFERENCES:
            return self._without_mcp(at)
        if kind != "tool_reference":
            known = ("tool_reference", *REFERENCES)
            raise InvalidRequest.wrong(f"{at}.type", one_of(known), kind)
        name = _name(tool, at)
        self._withdraw(name)
        return f"The tool {name} is no longer available."

    def on_call(self, name: str) -> None:
        """Offer a deferred tool that the conversation has called, or that must be called."""
        tool = self._by_name.get(name)
        if tool is not None and tool.state == "deferred":
            tool.state, tool.is_at_start = "offered", True

    def _offer(self, tool: OfferedTool) -> str:
        words = f"The tool {tool.name} is available now"
        before, tool.state = tool.state, "offered"
        if before != "deferred":
            return f"{words}."
        return f"{words}:\n{to_json(tool.chat['function'])}"

    def _without_mcp(self, at: str) -> str:
        problem = "this server connects to no MCP servers"
        self.warnings.append(OutputWarning(TOOL_LEFT_OUT, f"{at}: left out, because {problem}"))
        return ""

    def _withdraw(self, name: Any) -> None:
        tool = self._by_name.get(name) if isinstance(name, str) else None
        if tool is not None:
            tool.state = "withdrawn"

    # ---- the chat

    @property
    def offered(self) -> list[OfferedTool]:
        """The tools that the answer may call."""
        return [tool for tool in self._tools if tool.state == "offered"]

    @property
    def at_start(self) -> list[dict[str, Any]]:
        """The tools that the start of the prompt defines. If all of them were loaded later, they
        are defined there nevertheless, because a template explains how calls are written only if
        it has tools."""
        shown = [tool.chat for tool in self._tools if tool.is_at_start]
        return shown or [tool.chat for tool in self.offered]


def _not_run(kind: object) -> str:
    return f"this server does not run Anthropic's own tools such as {kind!r}"


def _flag(tool: Mapping[str, Any], name: str, at: str) -> bool:
    value = tool.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest.wrong(f"{at}.{name}", "true or false", value)
    return bool(value)


def _name(tool: Mapping[str, Any], at: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str):
        raise InvalidRequest.wrong(f"{at}.name", "a string", name)
    return name
