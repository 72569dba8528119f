"""Calls that Anthropic's service executed, in the history of a Messages request."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.api.anthropic.requests import MessagesBody
from gateway.api.anthropic.service_calls import NO_RESULT, service_result
from gateway.api.anthropic.translate import translate
from gateway.api.openai.requests import ChatBody
from gateway.http.body import decode

HI = {"role": "user", "content": "hi"}
SEARCH = {
    "type": "server_tool_use",
    "id": "srv_1",
    "name": "web_search",
    "input": {"query": "tides"},
}
FOUND = {
    "type": "web_search_tool_result",
    "tool_use_id": "srv_1",
    "content": [
        {
            "type": "web_search_result",
            "title": "Tides",
            "url": "https://tides.example",
            "encrypted_content": "x",
        },
        {"type": "web_search_result", "title": "Ebb", "url": "https://ebb.example"},
    ],
}
FOUND_TEXT = (
    '{"title":"Tides","url":"https://tides.example"}\n{"title":"Ebb","url":"https://ebb.example"}'
)


def chat(*blocks: Any, tools: list[Any] | None = None, more: tuple[Any, ...] = ()) -> ChatBody:
    messages = [HI, {"role": "assistant", "content": list(blocks)}, *more]
    data = {"model": "m", "max_tokens": 9, "messages": messages, "tools": tools}
    return translate(decode(msgspec.json.encode(data), MessagesBody)).chat


def seen(body: ChatBody) -> list[tuple[str, list[str], list[str]]]:
    """Return (role, texts, names of calls) of each message."""
    return [
        (
            message["role"],
            [part["text"] for part in message["content"]],
            [call["function"]["name"] for call in message.get("tool_calls", ())],
        )
        for message in body.messages[1:]
    ]


def test_a_call_and_its_result_are_read_like_those_of_other_tools() -> None:
    text = {"type": "text", "text": "Let me see."}
    end = {"type": "text", "text": "At noon."}
    body = chat(text, SEARCH, FOUND, end, more=(HI,))
    assert seen(body) == [
        ("assistant", ["Let me see."], ["web_search"]),
        ("tool", [FOUND_TEXT], []),
        ("assistant", ["At noon."], []),
        ("user", ["hi"], []),
    ]


def test_a_call_without_a_result_has_a_note_in_its_place() -> None:
    assert seen(chat(SEARCH, more=(HI,)))[1] == ("tool", [NO_RESULT], [])


def test_the_answer_continues_a_text_but_not_a_result() -> None:
    assert chat(SEARCH, FOUND).messages[-1]["role"] == "tool"
    assert not chat(SEARCH, FOUND).continue_final_message
    assert chat(SEARCH, FOUND, {"type": "text", "text": "At"}).continue_final_message


def test_a_search_for_tools_offers_those_that_it_found() -> None:
    tools = [
        {"name": "first", "input_schema": {"type": "object"}},
        {"name": "late", "input_schema": {"type": "object"}, "defer_loading": True},
    ]
    search = {"type": "server_tool_use", "id": "s", "name": "tool_search", "input": {}}
    content = {
        "type": "tool_search_tool_search_result",
        "tool_references": [{"type": "tool_reference", "tool_name": "late"}],
    }
    found = {"type": "tool_search_tool_result", "tool_use_id": "s", "content": content}
    ((_, (words,), _),) = [
        each for each in seen(chat(search, found, tools=tools)) if each[0] == "tool"
    ]
    assert words.startswith("The tool late is available now")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("done", "done"),
        (None, NO_RESULT),
        ([], NO_RESULT),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ({"type": "web_search_tool_result_error", "error_code": "too_many"}, "Error: too_many"),
        (
            {"type": "bash_code_execution_result", "stdout": "4\n", "stderr": "", "content": []},
            '{"stdout":"4\\n"}',
        ),
        ({"type": "encrypted_result", "encrypted_stdout": "x"}, NO_RESULT),
        ([3, None], NO_RESULT),
    ],
)
def test_a_result_is_read_in_each_form(content: Any, text: str) -> None:
    assert service_result(content) == text
