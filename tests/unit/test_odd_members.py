"""A member of a request that has a wrong kind of value is refused, and never breaks the gateway.

Each member of each tool, item and block, at any depth, is replaced by a value of every kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import msgspec
import pytest

from gateway.api.anthropic.requests import MessagesBody
from gateway.api.anthropic.translate import translate
from gateway.api.openai.requests import ChatBody
from gateway.api.openai.tools import tool_plan
from gateway.api.responses.items import input_items
from gateway.api.responses.requests import ResponsesBody
from gateway.api.responses.translate import chat_body
from gateway.http.body import decode
from protocol.wire.errors import ServingError
from tests.support.custom_tools import JSON, custom_tool

Json = dict[str, Any]
ODD: tuple[Any, ...] = (None, True, 5, 0.5, "x", "", [], [5], [[]], {}, {"type": 5}, {"type": []})
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": True}
CHAT = {
    "tools": [{"type": "function", "function": FUNCTION}, custom_tool("json", "lark", JSON)],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
}
TEXT = {"type": "text", "text": "a"}
MESSAGES = {
    "system": [TEXT],
    "tools": [
        {"name": "look", "description": "Looks.", "input_schema": SCHEMA},
        {"name": "late", "input_schema": SCHEMA, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 2},
    ],
    "messages": [
        {"role": "user", "content": [TEXT]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "b", "signature": "s"},
                {"type": "server_tool_use", "id": "s1", "name": "tool_search", "input": {}},
                {
                    "type": "tool_search_tool_result",
                    "tool_use_id": "s1",
                    "content": {
                        "tool_references": [{"type": "tool_reference", "tool_name": "late"}]
                    },
                },
                {"type": "server_tool_use", "id": "s2", "name": "web_search", "input": {"q": "a"}},
                {
                    "type": "web_search_tool_result",
                    "tool_use_id": "s2",
                    "content": [{"type": "web_search_result", "title": "a", "url": "b"}],
                },
                {"type": "tool_use", "id": "t", "name": "look", "input": {"a": "b"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "is_error": True,
                    "content": [TEXT, {"type": "tool_reference", "tool_name": "late"}],
                }
            ],
        },
        {
            "role": "system",
            "content": [
                {
                    "type": "tool_addition",
                    "tool": {
                        "type": "tool_definition",
                        "definition": {"name": "new", "input_schema": SCHEMA},
                    },
                },
                {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}},
            ],
        },
        {"role": "user", "content": [TEXT]},
    ],
}
GRAMMAR = {"type": "grammar", "syntax": "regex", "definition": "[a-c]+"}
RESPONSES = {
    "tools": [
        {"type": "function", **FUNCTION},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]},
        {"type": "custom", "name": "patch", "format": GRAMMAR},
        {"type": "local_shell"},
        {"type": "shell", "environment": {"type": "local"}},
        {"type": "apply_patch"},
        {"type": "tool_search", "execution": "client", "parameters": SCHEMA},
        {"type": "web_search", "filters": {"allowed_domains": ["a"]}},
    ],
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b"}]},
        {"type": "function_call", "call_id": "f", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "f", "output": "c"},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "ab"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "d"}, {"type": "input_image"}],
        },
        {
            "type": "local_shell_call",
            "call_id": "l",
            "action": {"type": "exec", "command": ["ls"], "env": {}},
        },
        {"type": "local_shell_call_output", "call_id": "l", "output": "e"},
        {"type": "shell_call", "call_id": "s", "action": {"commands": ["ls"]}},
        {
            "type": "shell_call_output",
            "call_id": "s",
            "output": [{"stdout": "a", "stderr": "b", "outcome": {"type": "exit", "exit_code": 0}}],
        },
        {
            "type": "apply_patch_call",
            "call_id": "p",
            "operation": {"type": "create_file", "path": "a", "diff": "+b"},
        },
        {"type": "apply_patch_call_output", "call_id": "p", "status": "completed", "output": "f"},
        {"type": "tool_search_call", "call_id": "t", "arguments": {"query": "a"}},
        {
            "type": "tool_search_output",
            "call_id": "t",
            "tools": [{"type": "function", **FUNCTION, "name": "found"}],
        },
        {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "a"}},
        {"type": "code_interpreter_call", "id": "i", "code": "1", "outputs": [{"logs": "2"}]},
        {"type": "file_search_call", "id": "h", "queries": ["a"], "results": [{"text": "b"}]},
        {"type": "mcp_call", "id": "m", "name": "n", "arguments": "{}", "output": "o"},
        {"type": "mcp_list_tools", "server_label": "s", "tools": [{"name": "n"}]},
        {"type": "mcp_approval_request", "name": "n", "arguments": "{}", "server_label": "s"},
        {"type": "mcp_approval_response", "approve": True, "reason": "r"},
        {"type": "additional_tools", "tools": [{"type": "function", **FUNCTION, "name": "more"}]},
    ],
}


def read_chat(body: Json) -> None:
    tool_plan(decode(_bytes({"messages": [{"role": "user", "content": "a"}], **body}), ChatBody))


def read_messages(body: Json) -> None:
    chat = translate(decode(_bytes({"model": "m", "max_tokens": 5, **body}), MessagesBody))
    tool_plan(chat.chat, chat.shown_tools)


def read_responses(body: Json) -> None:
    parsed = decode(_bytes({"model": "m", **body}), ResponsesBody)
    translation = chat_body(parsed, input_items(parsed.input))
    tool_plan(translation.chat, translation.tools.shown)


def _bytes(body: Json) -> bytes:
    return msgspec.json.encode(body)


READERS: dict[str, tuple[Callable[[Json], None], Json]] = {
    "chat": (read_chat, CHAT),
    "messages": (read_messages, MESSAGES),
    "responses": (read_responses, RESPONSES),
}


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every member and item in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield (*at, key)
        if isinstance(each, dict | list):
            yield from places(each, (*at, key))


@pytest.mark.parametrize("name", READERS)
def test_the_body_is_read_as_it_is(name: str) -> None:
    read, body = READERS[name]
    read(body)


@pytest.mark.parametrize("name", READERS)
def test_a_wrong_value_anywhere_is_refused_or_read(name: str) -> None:
    read, body = READERS[name]
    broken = {}
    for path in places(body):
        for odd in ODD:
            changed = deepcopy(body)
            parent = changed
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = odd
            try:
                read(changed)
            except ServingError:
                pass
            except Exception as error:
                broken[path, repr(odd)] = repr(error)
    assert broken == {}
