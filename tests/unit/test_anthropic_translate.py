"""A Messages request becomes a chat request. Errors name fields of the Messages request."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.api.anthropic.requests import CountBody, MessagesBody
from gateway.api.anthropic.translate import (
    NO_BUDGET,
    MessagesTranslation,
    translate,
    without_unkept_budget,
)
from gateway.api.openai.prepare import LEFT_OUT
from gateway.api.openai.requests import ChatBody
from gateway.formats.events import OutputWarning
from gateway.formats.model_format import ModelOutputFormat
from gateway.http.body import decode
from gateway.text.tokenizer import Tokenizer
from protocol.wire.errors import InvalidRequest
from tests.support.scripted_engine import scripted_card, thinking_card

HI = [{"role": "user", "content": "hi"}]
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


def body(**fields: Any) -> MessagesBody:
    data = msgspec.json.encode({"model": "m", "max_tokens": 9, "messages": HI} | fields)
    return decode(data, MessagesBody)


def chat(**fields: Any) -> ChatBody:
    return translate(body(**fields)).chat


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def use(call_id: str, name: str = "weather", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments, **EPHEMERAL}


def result(call_id: str, content: Any = "fine", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def contents(messages: list[Any]) -> list[tuple[str, list[str]]]:
    return [(m["role"], [part["text"] for part in m["content"]]) for m in messages]


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        translate(body(**fields))
    assert raised.value.param is not None
    assert raised.value.message.startswith(raised.value.param), raised.value.message
    return raised.value


# ---- conversations
def test_system_and_turns_become_messages() -> None:
    translated = chat(
        system=[text("Be kind."), {**text("Be brief."), **EPHEMERAL}],
        messages=[*HI, {"role": "assistant", "content": "Hello."}, user(text("one"), text("two"))],
    )
    assert contents(translated.messages) == [
        ("system", ["Be kind.", "Be brief."]),
        ("user", ["hi"]),
        ("assistant", ["Hello."]),
        ("user", ["one", "two"]),
    ]


def test_a_billing_header_is_not_part_of_the_prompt() -> None:
    translated = chat(system=[text("x-anthropic-billing-header: cch=abc;"), text("Be kind.")])
    assert contents(translated.messages)[0] == ("system", ["Be kind."])
    assert contents(chat(system="").messages) == [("user", ["hi"])]


def test_consecutive_turns_of_one_role_are_one_turn() -> None:
    messages = [*HI, user(text("there")), assistant(text("a")), assistant(text("b")), *HI]
    assert contents(chat(messages=messages).messages) == [
        ("user", ["hi", "there"]),
        ("assistant", ["a", "b"]),
        ("user", ["hi"]),
    ]


def test_thinking_becomes_the_reasoning_of_its_turn_whatever_its_signature() -> None:
    messages = [
        *HI,
        assistant(
            {"type": "thinking", "thinking": "one", "signature": "of somebody"},
            {"type": "redacted_thinking", "data": "EmwKAhgB"},
            {"type": "thinking", "thinking": "two", "signature": ""},
            text("Hello."),
        ),
        *HI,
    ]
    message = chat(messages=messages).messages[1]
    assert message["reasoning"] == "one\n\ntwo"
    assert message["content"] == [text("Hello.")]


def test_calls_and_their_results_keep_their_order() -> None:
    messages = [
        *HI,
        assistant(text("I look."), use("c1", city="Köln"), use("c2", "now")),
        user(result("c2", [text("12:00"), text("UTC")]), result("c1"), text("Well?")),
    ]
    translated = chat(messages=messages).messages
    assert translated[1]["tool_calls"] == [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Köln"}},
        },
        {"id": "c2", "type": "function", "function": {"name": "now", "arguments": {}}},
    ]
    assert [(m["role"], m.get("tool_call_id"), m.get("name")) for m in translated[2:]] == [
        ("tool", "c2", "now"),
        ("tool", "c1", "weather"),
        ("user", None, None),
    ]
    assert contents(translated[2:]) == [
        ("tool", ["12:00", "UTC"]),
        ("tool", ["fine"]),
        ("user", ["Well?"]),
    ]


def test_results_may_be_in_several_turns_of_the_user() -> None:
    messages = [*HI, assistant(use("a"), use("b")), user(result("a")), user(result("b"))]
    assert [m["role"] for m in chat(messages=messages).messages] == [
        *("user", "assistant", "tool", "tool")
    ]


@pytest.mark.parametrize(
    ("content", "is_error", "expected"),
    [
        (None, None, []),
        (None, True, ["Error:"]),
        ("no such file", True, ["Error:", "no such file"]),
        ("Error: no such file", True, ["Error: no such file"]),
        ("fine", False, ["fine"]),
    ],
)
def test_a_result_that_is_an_error_starts_with_error(
    content: str | None, is_error: bool | None, expected: list[str]
) -> None:
    messages = [*HI, assistant(use("a")), user(result("a", content, is_error=is_error))]
    assert contents(chat(messages=messages).messages)[-1] == ("tool", expected)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}


def test_images_keep_their_places_and_paths() -> None:
    result_of_tool = result("a", [text("seen:"), IMAGE])
    messages = [user(text("see:"), IMAGE), assistant(use("a")), user(result_of_tool)]
    asked, _, answered = translate(body(messages=messages)).chat.messages
    first, second = asked["content"][1], answered["content"][1]
    assert (first.base64, first.note) == ("iVBO", "")
    assert first.param == "messages[0].content[1].source.data"
    assert second.param == "messages[2].content[0].content[1].source.data"
    assert "left out" in second.note


def test_an_unreadable_block_of_a_tool_result_is_replaced_by_a_line() -> None:
    messages = [*HI, assistant(use("a")), user(result("a", [text("seen:"), PDF]))]
    translated = translate(body(messages=messages))
    (_, (first, second)) = contents(translated.chat.messages)[-1]
    assert first == "seen:"
    assert "document" in second
    (warning,) = translated.warnings
    assert warning.code == LEFT_OUT
    assert "messages[2].content[0].content[1]" in warning.message


def test_text_documents_become_text() -> None:
    by_text = {
        "type": "document",
        "title": "Weather",
        "context": "of 1816",
        "source": {"type": "text", "media_type": "text/plain", "data": "No summer."},
        "citations": {"enabled": False},
    }
    by_blocks = {"type": "document", "source": {"type": "content", "content": [text("a")]}}
    found = {"type": "search_result", "title": "T", "source": "S", "content": [text("b")]}
    translated = chat(messages=[user(by_text, by_blocks, found)])
    assert contents(translated.messages) == [
        (
            "user",
            ["title: Weather\ncontext: of 1816\n\nNo summer.", "a", "title: T\nsource: S\n\nb"],
        )
    ]


def test_a_last_turn_of_the_assistant_is_continued() -> None:
    assert chat(messages=[*HI, assistant(text("Well,"))]).continue_final_message is True
    assert chat().continue_final_message is None


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([3], "messages[0]"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([user(3)], "messages[0].content[0]"),
        ([user({"type": "text"})], "messages[0].content[0].text"),
        ([user({"type": "audio"})], "messages[0].content[0].type"),
        ([user({"type": ["text"]})], "messages[0].content[0].type"),
        ([user(PDF)], "messages[0].content[0].source.type"),
        ([user({"type": "document"})], "messages[0].content[0].source"),
        ([user({"type": "thinking", "thinking": "x"})], "messages[0].content[0].type"),
        ([*HI, assistant({"type": "thinking"})], "messages[1].content[0].thinking"),
        ([*HI, assistant({"type": "code_tool_use"})], "messages[1].content[0].type"),
        ([*HI, assistant({"type": "server_tool_use"})], "messages[1].content[0].id"),
        (
            [*HI, assistant({"type": "mcp_tool_result", "tool_use_id": "s"})],
            "messages[1].content[0].tool_use_id",
        ),
        ([*HI, assistant({**use("a"), "input": "x"})], "messages[1].content[0].input"),
        ([*HI, assistant({**use("a"), "name": None})], "messages[1].content[0].name"),
        ([user(result("a"))], "messages[0].content[0].tool_use_id"),
        ([*HI, assistant(text("x"), use("a"))], "messages[1].content[1]"),
        ([*HI, assistant(use("a")), *HI], "messages[1].content[0]"),
        ([*HI, assistant(use("a"), use("a")), user(result("a"))], "messages[1].content[1]"),
        (
            [*HI, assistant(use("a")), user(result("a"), result("a"))],
            "messages[2].content[1].tool_use_id",
        ),
        (
            [*HI, assistant(use("a")), user(text("x")), assistant(text("y")), user(result("a"))],
            "messages[1].content[0]",
        ),
        (
            [*HI, assistant(use("a")), user(result("a", is_error="yes"))],
            "messages[2].content[0].is_error",
        ),
        (
            [*HI, assistant(use("a")), user(result("a", [{"text": "x"}]))],
            "messages[2].content[0].content[0].type",
        ),
    ],
)
def test_an_error_names_the_path_of_the_invalid_value(messages: list[Any], param: str) -> None:
    assert refused(messages=messages).param == param


def test_each_chat_message_has_a_path_in_the_request() -> None:
    messages = [
        user(text("a"), text("b")),
        assistant(use("c")),
        user(result("c"), text("d")),
        assistant(text("e")),
    ]
    translated = translate(body(system="s", messages=messages))
    assert translated.paths == [
        "system",
        "messages[0].content[0]",
        "messages[1]",
        "messages[2].content[0]",
        "messages[2].content[1]",
        "messages[3]",
    ]
    with pytest.raises(InvalidRequest) as raised, translated.translate_errors():
        raise InvalidRequest("messages[3].content: bad", param="messages[3].content")
    assert raised.value.param == "messages[2].content[0]"
    assert raised.value.message == "messages[2].content[0]: bad"


# ---- tools
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "Tells.", "input_schema": SCHEMA}


def test_tools_become_functions() -> None:
    custom = {**TOOL, "name": "b", "type": "custom", "strict": True, **EPHEMERAL}
    translated = chat(tools=[TOOL, custom])
    function = {"name": "weather", "description": "Tells.", "parameters": SCHEMA}
    assert translated.tools == [
        {"type": "function", "function": function},
        {"type": "function", "function": {**function, "name": "b", "strict": True}},
    ]


@pytest.mark.parametrize(
    ("choice", "translated", "parallel"),
    [
        (None, None, None),
        ({"type": "auto"}, "auto", None),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any", "disable_parallel_tool_use": False}, "required", True),
        ({"type": "none"}, "none", None),
        (
            {"type": "tool", "name": "weather"},
            {"type": "function", "function": {"name": "weather"}},
            None,
        ),
    ],
)
def test_a_tool_choice_becomes_that_of_a_chat(
    choice: Any, translated: Any, parallel: bool | None
) -> None:
    chat_request = chat(tools=[TOOL], tool_choice=choice)
    assert (chat_request.tool_choice, chat_request.parallel_tool_calls) == (translated, parallel)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": ["x"]}, "tools[0]"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"output_config": {"task_budget": 3}}, "output_config.task_budget"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"output_format": 3}, "output_format"),
        ({"thinking": {"type": "enabled", "display": "x"}}, "thinking.display"),
        ({"thinking": {"type": "enabled", "depth": 3}}, "thinking.depth"),
        ({"system": 3}, "system"),
        ({"system": [IMAGE]}, "system[0].type"),
    ],
)
def test_an_unsupported_field_is_refused_by_name(fields: Any, param: str) -> None:
    assert refused(**fields).param == param


@pytest.mark.parametrize(
    ("chat_name", "own"),
    [
        ("tools[3].function.parameters.type", "tools[3].input_schema.type"),
        ("tools[3].function.name", "tools[3].name"),
        ("tools[3].function", "tools[3]"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("response_format.json_schema.schema", "output_config.format.schema"),
        ("response_format", "output_config.format"),
        ("reasoning_effort", "output_config.effort"),
        ("stop", "stop_sequences"),
        ("temperature", "temperature"),
    ],
)
def test_errors_about_the_chat_name_fields_of_the_request(chat_name: str, own: str) -> None:
    translated: MessagesTranslation = translate(body())
    with pytest.raises(InvalidRequest) as raised, translated.translate_errors():
        raise InvalidRequest(f"{chat_name} is odd", param=chat_name)
    assert (raised.value.param, raised.value.message) == (own, f"{own} is odd")


# ---- the rest
def test_fields_become_their_counterparts_in_the_chat() -> None:
    schema = {"type": "object"}
    translated = chat(
        stop_sequences=["a", "b"],
        temperature=0.5,
        top_p=0.5,
        top_k=3,
        seed=7,
        cache_salt="s",
        priority=2,
        chat_template_kwargs={"x": 1},
        thinking={"type": "enabled", "budget_tokens": 2048, "display": "summarized"},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}},
        metadata={"user_id": "u"},
        service_tier="auto",
    )
    assert (translated.model, translated.max_tokens, translated.stop) == ("m", 9, ["a", "b"])
    assert (translated.temperature, translated.top_p, translated.top_k, translated.seed) == (
        0.5,
        0.5,
        3,
        7,
    )
    assert (translated.cache_salt, translated.priority, translated.chat_template_kwargs) == (
        "s",
        2,
        {"x": 1},
    )
    assert translated.thinking == {"type": "enabled", "budget_tokens": 2048}
    assert translated.reasoning_effort == "high"
    assert translated.response_format == {"type": "json_schema", "json_schema": {"schema": schema}}


def test_output_format_is_accepted_as_an_older_spelling() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    translated = translate(body(output_format=form))
    assert translated.chat.response_format == {
        "type": "json_schema",
        "json_schema": {"schema": form["schema"]},
    }
    assert translated.format_field == "output_format"
    refused(output_format=form, output_config={"format": form})


def test_max_tokens_is_required_for_messages_but_not_for_counting() -> None:
    data = msgspec.json.encode({"messages": HI})
    assert decode(data, CountBody).max_tokens is None
    with pytest.raises(InvalidRequest) as raised:
        decode(data, MessagesBody)
    assert raised.value.param == "max_tokens"


def test_a_thinking_budget_that_nothing_would_keep_is_dropped_with_a_warning() -> None:
    thinking = {"type": "enabled", "budget_tokens": 2048}
    chat_request = chat(thinking=thinking)
    plain, thinker = (
        ModelOutputFormat(card, Tokenizer(card)) for card in (scripted_card(), thinking_card())
    )
    translated, warnings = without_unkept_budget(chat_request, plain)
    assert translated.thinking == {"type": "enabled"}
    assert warnings == [
        OutputWarning(
            NO_BUDGET,
            "thinking.budget_tokens: ignored, because this model's reasoning format is unknown; "
            "leave the field out, or restart the server with --reasoning-format",
        )
    ]
    translated, warnings = without_unkept_budget(chat_request, thinker)
    assert (translated.thinking, warnings) == (thinking, [])
