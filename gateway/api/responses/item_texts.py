"""Writes the items of a Responses request as what a chat has: calls, results and texts.

A call that OpenAI's service executed is one item with its result. It becomes a call and a result,
so that the model reads it like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from gateway.api.responses.tools import described_tools, qualified
from gateway.images.source import NOTE, source_of
from gateway.prompt.content import to_json

CALLS = (
    *("function_call", "custom_tool_call", "local_shell_call", "shell_call"),
    *("apply_patch_call", "tool_search_call", "computer_call"),
)
"""Types of items that are calls. An item of its own has the output."""
OUTPUTS = (
    *("function_call_output", "custom_tool_call_output", "local_shell_call_output"),
    *("shell_call_output", "apply_patch_call_output", "tool_search_output"),
    "computer_call_output",
)
"""Types of items that are outputs of calls."""
SERVICE_CALLS = (
    *("web_search_call", "file_search_call", "code_interpreter_call"),
    *("image_generation_call", "mcp_call"),
)
"""Types of items that are calls with their output, because OpenAI's service executed them."""
NOTES = ("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "additional_tools")
"""Types of items that are neither messages nor calls."""
NO_RESULT = "The result is not part of this conversation."
LEFT_OUT = "[{} left out: this model reads text only]"
"""The text that replaces an image or a file in the prompt."""


class ItemCall(msgspec.Struct, frozen=True):
    """A call: the tool's name in the chat, and the arguments, or the text of a custom tool."""

    name: str
    arguments: str = ""
    text: str | None = None

    def tool_call(self, call_id: str | None) -> dict[str, Any]:
        """Return the call in the form of a chat's message."""
        if self.text is not None:
            custom = {"name": self.name, "input": self.text}
            return {"id": call_id, "type": "custom", "custom": custom}
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": call_id, "type": "function", "function": function}


def call_id_of(item: Mapping[str, Any]) -> str | None:
    """Return the id that a call and its output share; None if there is none."""
    found = item.get("call_id") or (item.get("id") if item["type"] in _NAMED_BY_ID else None)
    return found if isinstance(found, str) else None


_NAMED_BY_ID = ("local_shell_call_output", *SERVICE_CALLS)


def call_of(item: Mapping[str, Any]) -> ItemCall:
    """Return the call that an item of CALLS or SERVICE_CALLS is."""
    match item["type"]:
        case "function_call":
            return ItemCall(qualified(item.get("namespace"), item["name"]), item["arguments"])
        case "custom_tool_call":
            return ItemCall(qualified(item.get("namespace"), item["name"]), text=item["input"])
        case "mcp_call":
            return ItemCall(item["name"], item["arguments"])
        case kind:
            name, member = _ACTIONS[kind]
            arguments = item.get(member)
            if kind == "local_shell_call" and isinstance(arguments, Mapping):
                arguments = {k: v for k, v in arguments.items() if k != "type" and v}
            return ItemCall(name, _object_json(arguments, member))


_ACTIONS: Mapping[str, tuple[str, str]] = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "tool_search_call": ("tool_search", "arguments"),
    "computer_call": ("computer", "action"),
    "web_search_call": ("web_search", "action"),
    "file_search_call": ("file_search", "queries"),
    "code_interpreter_call": ("code_interpreter", "code"),
    "image_generation_call": ("image_generation", "revised_prompt"),
}
"""Type of an item -> (name of the tool, member that has the arguments)."""


def _object_json(value: Any, name: str) -> str:
    """Return arguments as the JSON of an object. A value that is none becomes its member `name`."""
    if isinstance(value, Mapping):
        return to_json({key: each for key, each in value.items() if each is not None})
    return "{}" if value is None else to_json({name: value})


def service_result(item: Mapping[str, Any]) -> str:
    """Return the result of a call that OpenAI's service executed."""
    match item["type"]:
        case "mcp_call":
            error = item.get("error")
            return f"Error: {_text(error)}" if error else _text(item.get("output")) or NO_RESULT
        case "code_interpreter_call":
            texts = [_text(each.get("logs")) for each in _objects(item.get("outputs"))]
            return "\n".join(filter(None, texts)) or NO_RESULT
        case "file_search_call":
            results = item.get("results")
            return to_json(results) if results else NO_RESULT
        case "image_generation_call":
            return LEFT_OUT.format("image")
    return NO_RESULT


def output_of(item: Mapping[str, Any], at: str) -> tuple[Any, str, list[str]]:
    """Return (the content of an output as a chat has it, the path of its member in the request, the
    paths of parts that the model cannot read, in whose place it reads a note)."""
    match item["type"]:
        case "shell_call_output":
            return _shell_output(item["output"]), f"{at}.output", []
        case "apply_patch_call_output":
            text = item.get("output") or item.get("status") or ""
            return text, f"{at}.output", []
        case "tool_search_output":
            return described_tools(item["tools"], f"{at}.tools"), f"{at}.tools", []
        case "computer_call_output":
            return LEFT_OUT.format("screenshot"), f"{at}.output", [f"{at}.output"]
    content = item["output"]
    if isinstance(content, str):
        return content, f"{at}.output", []
    parts: list[Any] = []
    left_out = []
    for place, part in enumerate(content):
        if part.get("type") == "input_image":
            inner = f"{at}.output[{place}]"
            parts.append(replace(source_of(part, inner), kind_at=inner, note=NOTE))
            continue
        text = part.get("text")
        if not isinstance(text, str):
            text = LEFT_OUT.format(str(part.get("type")).removeprefix("input_"))
            left_out.append(f"{at}.output[{place}]")
        parts.append({"type": "text", "text": text})
    return parts, f"{at}.output", left_out


def _shell_output(chunks: Any) -> str:
    """Return the output of shell commands as text: what they wrote, and how they ended."""
    lines: list[str] = []
    for chunk in chunks:
        lines += [_text(chunk.get(name)).rstrip("\n") for name in ("stdout", "stderr")]
        outcome = chunk.get("outcome")
        if isinstance(outcome, Mapping):
            code = outcome.get("exit_code")
            lines.append("time limit exceeded" if code is None else f"exit code {code}")
    return "\n".join(filter(None, lines))


def note_of(item: Mapping[str, Any], at: str) -> tuple[str, str]:
    """Return (role, text) of the message that an item of NOTES becomes."""
    match item["type"]:
        case "mcp_list_tools":
            names = [str(tool.get("name")) for tool in _objects(item.get("tools"))]
            return "assistant", f"[Tools of {item.get('server_label')}: {', '.join(names)}]"
        case "mcp_approval_request":
            call = f"{item.get('name')}({item.get('arguments')})"
            return "assistant", f"May I call {call} of {item.get('server_label')}?"
        case "mcp_approval_response":
            reason = f": {item['reason']}" if item.get("reason") else "."
            return "user", f"{'Yes' if item.get('approve') else 'No'}{reason}"
    return "developer", described_tools(item["tools"], f"{at}.tools")


def _objects(value: Any) -> list[Mapping[str, Any]]:
    """Return the objects in a list, or none for any other value."""
    found = value if isinstance(value, list) else []
    return [each for each in found if isinstance(each, Mapping)]


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else to_json(value)
