"""Which call a tool's message answers in Ollama's API, whose calls may have no ids."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.api.ollama.requests import OllamaChatBody
from gateway.api.ollama.responses import API_VERSION
from gateway.api.ollama.translate import chat_of
from gateway.prompt.content import checked_turns
from protocol.wire.errors import InvalidRequest

CODEX_REQUIRES = (0, 13, 4)


def call(name: str, call_id: str | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {"function": {"name": name, "arguments": {}}}
    return made if call_id is None else {"id": call_id, **made}


def answered(calls: list[Any], results: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Return (index of the call, its name) for each result; the index is None for no call."""
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": "done", **result} for result in results),
    ]
    data = msgspec.json.encode({"model": "m", "messages": messages})
    chat = chat_of(msgspec.json.decode(data, type=OllamaChatBody))
    checked_turns(chat.messages)
    ids = [made["id"] for made in chat.messages[1]["tool_calls"]]
    places = {call_id: place for place, call_id in enumerate(ids)}
    return [
        (places.get(message.get("tool_call_id")), message.get("name"))
        for message in chat.messages[2:]
    ]


@pytest.mark.parametrize(
    ("calls", "results", "expected"),
    [
        # litellm sends the id with the result only
        ([call("a")], [{"tool_call_id": "call_9"}], [(0, "a")]),
        (
            [call("a"), call("b")],
            [{"tool_call_id": "x"}, {"tool_call_id": "y"}],
            [(0, "a"), (1, "b")],
        ),
        # the name is better than the order
        (
            [call("a"), call("b")],
            [{"tool_call_id": "x", "tool_name": "b"}, {"tool_call_id": "y", "tool_name": "a"}],
            [(1, "b"), (0, "a")],
        ),
        ([call("a")], [{"tool_call_id": "x", "tool_name": "other"}], [(0, "a")]),
        # results without ids
        ([call("a"), call("b")], [{"tool_name": "b"}, {}], [(1, "b"), (0, "a")]),
        ([call("a")], [{"tool_name": "other"}], [(None, "other")]),
        # ids on both sides
        (
            [call("a", "1"), call("a", "2")],
            [{"tool_call_id": "2"}, {"tool_call_id": "1"}],
            [(1, "a"), (0, "a")],
        ),
        ([call("a", "1"), call("b")], [{"tool_call_id": "x"}], [(1, "b")]),
        # more results than calls
        ([call("a")], [{"tool_call_id": "x"}, {"tool_call_id": "y"}], [(0, "a"), (None, None)]),
    ],
)
def test_a_result_answers_a_call(
    calls: list[Any], results: list[Any], expected: list[tuple[Any, Any]]
) -> None:
    assert answered(calls, results) == expected


@pytest.mark.parametrize("result", [{"tool_call_id": "x"}, {"tool_call_id": "x", "tool_name": "a"}])
def test_an_id_that_no_call_has_is_refused_if_all_calls_have_ids(result: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        answered([call("a", "1")], [result])
    assert raised.value.param == "messages[2].tool_call_id"


def test_an_id_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[3\]\.tool_call_id: must be a string"):
        answered([call("a")], [{"tool_call_id": "x"}, {"tool_call_id": 5}])


def test_the_version_is_one_that_codex_accepts() -> None:
    assert tuple(map(int, API_VERSION.split("."))) >= CODEX_REQUIRES


def test_a_tool_that_is_no_function_is_refused() -> None:
    function = {"type": "function", "function": {"name": "a"}}
    custom = {"type": "custom", "custom": {"name": "b"}}
    body = OllamaChatBody(model="m", messages=[], tools=[function, custom])
    words = 'must be "function"; got the text "custom"'
    with pytest.raises(InvalidRequest, match=words) as refusal:
        chat_of(body)
    assert refusal.value.param == "tools[1].type"
