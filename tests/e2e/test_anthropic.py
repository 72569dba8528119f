"""The Messages API of `tidegate serve` with the real model and the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.support.anthropic import prompt_tokens
from tests.support.prompts import FRUITS, names_a_fruit
from tests.support.server import SERVED_NAME, Server

ASKED: dict[str, Any] = {
    "model": SERVED_NAME,
    "max_tokens": 200,
    "extra_body": {"temperature": 0},  # no longer a parameter of the client
    "system": "You are a helpful assistant.",
}
QUESTION: list[Any] = [{"role": "user", "content": FRUITS}]
WEATHER: Any = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
    "strict": True,
}


@pytest.fixture
def client(exact_server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=exact_server.url, api_key="none", max_retries=0, timeout=300
    ) as client:
        yield client


def streamed(client: anthropic.Anthropic, **asked: Any) -> anthropic.types.Message:
    with client.messages.stream(**asked) as result:
        return result.get_final_message()


def said(message: anthropic.types.Message) -> list[Any]:
    """Return the content blocks without their random ids, and without the SDK's `parsed_output`."""
    return [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]


def test_three_fruits_whole_streamed_and_counted(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASKED, messages=QUESTION)
    result = streamed(client, **ASKED, messages=QUESTION)
    assert names_a_fruit(whole.content[0].text)
    assert said(result) == said(whole)
    assert result.stop_reason == whole.stop_reason == "end_turn"
    counted = client.messages.count_tokens(
        model=SERVED_NAME, system=ASKED["system"], messages=QUESTION
    )
    for usage in (whole.usage, result.usage):
        assert prompt_tokens(usage.model_dump()) == counted.input_tokens
    assert result.usage.output_tokens == whole.usage.output_tokens > 0


def test_a_session_with_a_tool(client: anthropic.Anthropic) -> None:
    history: list[Any] = [{"role": "user", "content": "How is the weather in Oslo?"}]
    asked: Any = {
        **ASKED,
        "tools": [WEATHER],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    whole = client.messages.create(**asked, messages=history, tool_choice=choice)
    result = streamed(client, **asked, messages=history, tool_choice=choice)
    assert said(result) == said(whole)
    assert result.stop_reason == "tool_use"
    call = result.content[-1]
    assert call.type == "tool_use"
    assert call.name == "weather"
    assert set(call.input) == {"city"}
    history += [
        {"role": "assistant", "content": result.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Rain, 4 °C."}],
        },
    ]
    last = streamed(client, **asked, messages=history, tool_choice={"type": "none"})
    assert said(last) == said(
        client.messages.create(**asked, messages=history, tool_choice={"type": "none"})
    )
    assert last.content[0].type == "text"


def test_an_answer_in_a_form(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"fruit": {"enum": ["banana", "brick"]}},
        "required": ["fruit"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    message = client.messages.create(**ASKED, messages=QUESTION, output_config=form)
    assert '"banana"' in message.content[0].text


def test_a_stop_sequence_and_a_limit(client: anthropic.Anthropic) -> None:
    count: list[Any] = [{"role": "user", "content": "Count from one to ten: 1, 2, 3, ..."}]
    message = client.messages.create(**ASKED, messages=count, stop_sequences=["4"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "4")
    message = client.messages.create(**{**ASKED, "max_tokens": 3}, messages=count)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)
    long: list[Any] = [{"role": "user", "content": "word " * 20_000}]
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.messages.create(**ASKED, messages=long)
    assert raised.value.type == "invalid_request_error"
