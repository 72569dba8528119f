"""POST /v1/responses over a real gateway: whole and streamed, by raw HTTP and by the SDK."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from openai import OpenAI
from pydantic import BaseModel

from gateway.api.responses.responses import ResponseEvent, ResponseObject
from tests.support.gateway_process import GatewayProcess
from tests.support.http import error_of, exchange, json_of
from tests.support.responses import RESPONSES, items_of, kinds, typed_events, without_ids
from tests.support.scenarios import call
from tests.support.scripted_engine import ScriptedEngine, text_of, text_reply

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
BUSY_ANSWER = (
    "<think>\nLet me see.\n</think>\n\nI look it up."
    + call("weather", {"city": "Köln"})
    + call("weather", {"city": "Rom"})
)


def streamed(gateway: GatewayProcess, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, headers, data = exchange(gateway.port, RESPONSES, {**body, "stream": True})
    assert status == 200, data
    assert headers["content-type"].startswith("text/event-stream")
    events = typed_events(data)
    for event in events:
        msgspec.convert(event, ResponseEvent)
    return events


def whole(gateway: GatewayProcess, body: dict[str, Any]) -> dict[str, Any]:
    response_body: dict[str, Any] = json_of(gateway.post(RESPONSES, body))
    msgspec.convert(response_body, ResponseObject)
    return response_body


def refused(gateway: GatewayProcess, **body: Any) -> dict[str, Any]:
    error: dict[str, Any] = error_of(gateway.post(RESPONSES, {"input": "hi", **body}), 400)
    assert error["param"] is None or error["param"].partition("[")[0] in error["message"]
    return error


def test_a_plain_answer_is_one_message(engine: ScriptedEngine, client: OpenAI) -> None:
    engine.script = lambda generate: text_reply("Hello, world!")
    response = client.responses.create(model="scripted", input="hi", instructions="Be brief.")
    assert response.output_text == "Hello, world!"
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + 14
    assert text_of(engine.generates[0].prompt.tolist()) == "<system>Be brief.<user>hi<assistant>"


def test_reasoning_text_and_calls_are_items_in_their_order(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: text_reply(BUSY_ANSWER, marked=True)
    body = {"input": "weather?", "tools": [WEATHER]}
    events = streamed(gateway, body)
    assert kinds(events) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    final = events[-1]["response"]
    assert items_of(events) == final["output"]
    at_once = whole(gateway, body)
    assert without_ids(at_once["output"]) == without_ids(final["output"])
    assert at_once["usage"] == final["usage"]
    assert [item["type"] for item in final["output"]] == [
        *("reasoning", "message", "function_call", "function_call"),
    ]
    assert final["output"][0]["content"][0]["text"] == "Let me see."
    assert final["output"][3]["arguments"] == '{"city": "Rom"}'
    assert len({item["id"] for item in final["output"]}) == 4


def test_the_sdk_streams_and_folds(engine: ScriptedEngine, client: OpenAI) -> None:
    engine.script = lambda generate: text_reply(BUSY_ANSWER, marked=True)
    with client.responses.stream(model="scripted", input="hi", tools=[WEATHER]) as stream:  # type: ignore[list-item]
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "I look it up."
    calls = [item for item in final.output if item.type == "function_call"]
    assert [item.name for item in calls] == ["weather", "weather"]


def test_the_sdk_parses_a_structured_answer(engine: ScriptedEngine, client: OpenAI) -> None:
    class StreamPlace(BaseModel):
        city: str

    engine.script = lambda generate: text_reply('{"city": "Rom"}')
    response = client.responses.parse(model="scripted", input="hi", text_format=StreamPlace)
    assert response.output_parsed == StreamPlace(city="Rom")
    grammar = engine.generates[0].grammar
    assert grammar is not None
    assert grammar.body is not None


def test_logprobs_are_sent_with_their_text(engine: ScriptedEngine, gateway: GatewayProcess) -> None:
    engine.script = lambda generate: text_reply("<think>\nhm\n</think>\n\nHi!", marked=True)
    body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    events = streamed(gateway, body)
    final = events[-1]["response"]
    assert items_of(events) == final["output"]
    logprobs = final["output"][1]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in logprobs) == "Hi!"
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
    assert without_ids(whole(gateway, body)["output"]) == without_ids(final["output"])


def test_encrypted_reasoning_can_be_sent_back(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: text_reply("<think>\nDeep.\n</think>\n\nYes.", marked=True)
    body = {"input": "hi", "include": ["reasoning.encrypted_content"]}
    reasoning, _ = whole(gateway, body)["output"]
    assert reasoning["encrypted_content"]
    plain = {"type": "reasoning", "summary": [], "content": reasoning["content"]}
    sealed = {
        "type": "reasoning",
        "summary": [],
        "encrypted_content": reasoning["encrypted_content"],
    }
    user = {"role": "user", "content": "hi"}
    engine.generates.clear()
    for item in (plain, sealed):
        whole(gateway, {"input": [user, item, {"role": "assistant", "content": "Yes."}, user]})
    first, second = engine.generates
    assert first.prompt.tolist() == second.prompt.tolist()
    assert "Deep." in text_of(first.prompt.tolist())


def test_a_conversation_of_items_has_the_prompt_of_the_same_messages(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: text_reply("ok")
    arguments = '{"city": "Rom"}'
    whole(
        gateway,
        {
            "instructions": "Be kind.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
                {"type": "reasoning", "summary": [], "content": []},
                {"type": "message", "role": "assistant", "id": "msg_1", "content": "I look."},
                {
                    "type": "function_call",
                    "call_id": "c",
                    "name": "weather",
                    "arguments": arguments,
                },
                {"type": "function_call_output", "call_id": "c", "output": "sunny"},
                {"role": "user", "content": "thanks"},
            ],
            "tools": [WEATHER],
        },
    )
    function = {"name": "weather", "arguments": arguments}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        {"role": "user", "content": "thanks"},
    ]
    nested = {"name": "weather", "parameters": WEATHER["parameters"], "strict": False}
    chat = {"messages": messages, "tools": [{"type": "function", "function": nested}]}
    assert gateway.post("/v1/chat/completions", chat).status_code == 200
    by_items, by_messages = engine.generates
    assert text_of(by_items.prompt.tolist()) == text_of(by_messages.prompt.tolist())
    assert by_items.prompt.tolist() == by_messages.prompt.tolist()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "compaction"}]}, "input[0].type"),
        ({"input": [{"type": "computer_call"}]}, "input[0].call_id"),
        ({"input": [{"type": "shell_call", "call_id": "c"}]}, "input[0].action"),
        ({"input": [{"type": "tool_search_output", "tools": [1]}]}, "input[0].tools[0]"),
        ({"input": [{"type": "additional_tools"}]}, "input[0].tools"),
        (
            {
                "input": [
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "d", "output": "x"},
                ]
            },
            "input[1].call_id",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]},
            "input[0].encrypted_content",
        ),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [WEATHER, {"type": "namespace", "name": "n"}]}, "tools[1].tools"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [WEATHER, {**WEATHER}]}]},
            "tools[0].tools[1].name",
        ),
        (
            {"tools": [{"type": "custom", "name": "c", "format": {"type": "grammar"}}]},
            "tools[0].format.syntax",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "web_search"}},
            "tool_choice.type",
        ),
        ({"tools": [{"type": "web_search"}], "strict_params": True}, "tools[0]"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{**WEATHER, "parameters": {"type": "string"}}]}, "tools[0].parameters.type"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}},
            "tool_choice.name",
        ),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"include": ["file_search_call.results"], "strict_params": True}, "include[0]"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
def test_an_error_names_the_field_as_the_client_wrote_it(
    gateway: GatewayProcess, body: dict[str, Any], param: str
) -> None:
    assert refused(gateway, **body)["param"] == param


def test_a_conversation_that_is_too_long_is_refused_or_loses_its_oldest_items(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: text_reply("ok")
    old = {"role": "user", "content": "o" * (1 << 20)}
    items = [old, {"role": "assistant", "content": "a"}, {"role": "user", "content": "new"}]
    error = refused(gateway, input=items)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    response = whole(gateway, {"input": items, "truncation": "auto", "instructions": "stay"})
    assert response["truncation"] == "auto"
    assert text_of(engine.generates[0].prompt.tolist()) == "<system>stay<user>new<assistant>"


def test_fields_without_effect_are_named(engine: ScriptedEngine, gateway: GatewayProcess) -> None:
    engine.script = lambda generate: text_reply("ok")
    response = gateway.post(RESPONSES, {"input": "hi", "frobnicate": 1})
    assert response.headers["x-ignored-fields"] == "frobnicate"
    assert response.json()["ignored_params"] == ["frobnicate"]
    assert refused(gateway, frobnicate=1, strict_params=True)["param"] == "frobnicate"


def test_a_turn_that_answers_only_some_of_the_open_calls_is_refused(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: text_reply(BUSY_ANSWER, marked=True)
    first = whole(gateway, {"input": "hi", "tools": [WEATHER]})
    one, other = (item["call_id"] for item in first["output"] if "call_id" in item)
    outputs = [
        {"type": "function_call_output", "call_id": call_id, "output": "Rain."}
        for call_id in (one, other)
    ]
    fields = {"previous_response_id": first["id"], "tools": [WEATHER]}
    error = refused(gateway, **fields, input=outputs[:1])
    assert error["param"] == "input"
    assert other in error["message"]
    assert whole(gateway, {**fields, "input": outputs})["status"] == "completed"


def test_the_tokens_of_a_request_are_counted_without_sending_it(
    engine: ScriptedEngine, gateway: GatewayProcess, client: OpenAI
) -> None:
    engine.script = lambda generate: text_reply("Hello.")
    assert client.responses.input_tokens.count(model="scripted", input="hi").input_tokens > 2
    fields: dict[str, Any] = {"input": "hi", "instructions": "Be brief.", "tools": [WEATHER]}
    first = whole(gateway, fields)
    counted = gateway.post(f"{RESPONSES}/input_tokens", fields)
    assert counted.json() == {
        "object": "response.input_tokens",
        "input_tokens": first["usage"]["input_tokens"],
    }
    continuation = {"input": "and?", "previous_response_id": first["id"]}
    more = gateway.post(f"{RESPONSES}/input_tokens", continuation).json()["input_tokens"]
    assert more == whole(gateway, continuation)["usage"]["input_tokens"]
    assert len(engine.generates) == 2
    refused_count = gateway.post(f"{RESPONSES}/input_tokens", {"input": []})
    assert refused_count.status_code == 400
