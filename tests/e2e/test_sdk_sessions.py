"""One session with a tool in each of several client libraries, with the real model.

The session has a question, a required tool call, its result, an answer in text, and an answer that
is an object. Each turn is sent whole and streamed, and both answers must be equal. Ollama's API
cannot require a call, so its session begins with one that was made before.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

from tests.support.image_checkpoint import write_smolvlm
from tests.support.image_models import picture
from tests.support.server import SERVED_NAME, Server

QUESTION = "What is the weather in Oslo?"
RESULT = '{"sky": "clear", "celsius": -3}'
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bergen"]}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}
NAME, ABOUT = "weather", "The weather in a city."
WORDS = 24
"""Number of tokens of an answer in text."""


class Weather(BaseModel):
    # Without a limit, the small model may write on until its context is full.
    city: str = Field(max_length=40)
    is_cold: bool


@pytest.fixture
def client(exact_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{exact_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def check_arguments(text: str) -> None:
    arguments = json.loads(text)
    assert arguments["city"] in ("Oslo", "Bergen")
    assert set(arguments) <= {"city", "days"}


# ---- chat completions


CHAT_TOOL: Any = {
    "type": "function",
    "function": {"name": NAME, "description": ABOUT, "parameters": PARAMETERS},
}
CHAT: dict[str, Any] = {"model": SERVED_NAME, "temperature": 0}
DEMAND: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}


def chat_turn(client: openai.OpenAI, **asked: Any) -> Any:
    """Return the message of a whole answer, after checking that the streamed one is equal."""
    whole = client.chat.completions.create(**CHAT, **asked).choices[0]
    with client.chat.completions.stream(**CHAT, **asked) as stream:
        stream.until_done()
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == whole.finish_reason
    assert streamed.message.content == whole.message.content or not whole.message.content
    calls = [call.function for call in whole.message.tool_calls or ()]
    reply = [call.function for call in streamed.message.tool_calls or ()]
    assert [(c.name, c.arguments) for c in reply] == [(c.name, c.arguments) for c in calls]
    return whole


def test_chat_completions(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = chat_turn(client, messages=messages, tools=[CHAT_TOOL], **DEMAND)
    (call,) = first.message.tool_calls
    assert (first.finish_reason, call.function.name) == ("tool_calls", NAME)
    check_arguments(call.function.arguments)
    messages.append(first.message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
    second = chat_turn(client, messages=messages, max_completion_tokens=WORDS)
    assert second.message.content
    messages += [{"role": "assistant", "content": second.message.content}]
    messages += [{"role": "user", "content": "Say it as an object."}]
    parsed = client.chat.completions.parse(**CHAT, messages=messages, response_format=Weather)
    assert isinstance(parsed.choices[0].message.parsed, Weather)


# ---- completions


def test_completions(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": SERVED_NAME, "prompt": "Once upon a time", "temperature": 0}
    whole = client.completions.create(**asked, max_tokens=WORDS).choices[0]
    chunks = list(client.completions.create(**asked, max_tokens=WORDS, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "length"


# ---- responses


RESPONSES_TOOL: Any = {
    "type": "function",
    "name": NAME,
    "description": ABOUT,
    "parameters": PARAMETERS,
    "strict": True,
}


def said(response: Any) -> list[Any]:
    """Return the output items without their ids."""
    return [
        (item.name, item.arguments) if item.type == "function_call" else response.output_text
        for item in response.output
    ]


def response_turn(client: openai.OpenAI, **asked: Any) -> Any:
    whole = client.responses.create(**CHAT, **asked)
    with client.responses.stream(**CHAT, **asked) as stream:
        streamed = list(stream)[-1].response  # type: ignore[union-attr]
    assert said(streamed) == said(whole)
    assert (streamed.status, streamed.error) == (whole.status, None)
    return whole


def test_responses(client: openai.OpenAI) -> None:
    tools = [RESPONSES_TOOL]
    first = response_turn(client, input=QUESTION, tools=tools, **DEMAND)
    (call,) = first.output
    assert (call.type, call.name, first.status) == ("function_call", NAME, "completed")
    check_arguments(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    second = response_turn(
        client,
        input=[result],
        previous_response_id=first.id,
        tools=tools,
        tool_choice="none",
        max_output_tokens=WORDS,
    )
    assert second.output_text
    parsed = client.responses.parse(
        **CHAT, input="Say it as an object.", previous_response_id=second.id, text_format=Weather
    )
    assert isinstance(parsed.output_parsed, Weather)


# ---- messages


ANY: Any = {"type": "any", "disable_parallel_tool_use": True}
MESSAGES_TOOL: Any = {"name": NAME, "description": ABOUT, "input_schema": PARAMETERS}


def message_turn(client: anthropic.Anthropic, **asked: Any) -> Any:
    asked["extra_body"] = {"temperature": 0}
    whole = client.messages.create(model=SERVED_NAME, **asked)
    with client.messages.stream(model=SERVED_NAME, **asked) as stream:
        streamed = stream.get_final_message()
    parts = [
        [(block.type, getattr(block, "text", None), getattr(block, "input", None)) for block in one]
        for one in (whole.content, streamed.content)
    ]
    assert parts[0] == parts[1]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    return whole


def test_messages(exact_server: Server) -> None:
    with anthropic.Anthropic(base_url=exact_server.url, api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        asked: dict[str, Any] = {"tools": [MESSAGES_TOOL], "messages": messages}
        first = message_turn(client, max_tokens=100, tool_choice=ANY, **asked)
        assert first.stop_reason == "tool_use"
        (call,) = first.content
        check_arguments(json.dumps(call.input))
        answer = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
        messages += [{"role": "assistant", "content": [call.model_dump()]}]
        messages += [{"role": "user", "content": [answer]}]
        second = message_turn(client, max_tokens=WORDS, tool_choice={"type": "none"}, **asked)
        assert second.content[0].text


# ---- a library on top


def test_langchain(exact_server: Server) -> None:
    model = ChatOpenAI(
        model=SERVED_NAME,
        base_url=f"{exact_server.url}/v1",
        api_key=SecretStr("none"),
        temperature=0,
    )
    tools = model.bind_tools([CHAT_TOOL], **DEMAND)
    first = tools.invoke([HumanMessage(QUESTION)])
    assert isinstance(first, AIMessage)
    (call,) = first.tool_calls
    assert call["name"] == NAME
    history = [HumanMessage(QUESTION), first, ToolMessage(RESULT, tool_call_id=call["id"])]
    short = model.bind(max_completion_tokens=WORDS)
    whole = short.invoke(history).content
    assert whole
    assert "".join(str(chunk.content) for chunk in short.stream(history)) == whole


def test_llama_index(exact_server: Server) -> None:
    openai_like = pytest.importorskip(
        "llama_index.llms.openai_like", reason="`make` installs it, no extra does"
    )
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool

    def weather(city: str) -> str:
        """The weather in a city."""
        return RESULT

    options: dict[str, Any] = {
        "model": SERVED_NAME,
        "api_base": f"{exact_server.url}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": WORDS,
        "max_retries": 0,
    }
    model = openai_like.OpenAILike(is_chat_model=True, is_function_calling_model=True, **options)
    tool = FunctionTool.from_defaults(weather)
    first = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    (call,) = model.get_tool_calls_from_response(first)
    assert call.tool_name == NAME
    assert isinstance(call.tool_kwargs["city"], str)
    result = ChatMessage(
        role="tool", content=RESULT, additional_kwargs={"tool_call_id": call.tool_id}
    )
    history = [ChatMessage(role="user", content=QUESTION), first.message, result]
    whole = model.chat(history).message.content
    assert whole
    assert "".join(part.delta for part in model.stream_chat(history)) == whole
    texts = openai_like.OpenAILike(is_chat_model=False, **options)
    text = texts.complete("Once upon a time").text
    assert text
    assert "".join(part.delta for part in texts.stream_complete("Once upon a time")) == text


# ---- Ollama's API


def ollama_turn(client: ollama.Client, **asked: Any) -> Any:
    """Return the whole answer, after checking that the streamed one is equal."""
    asked = {"model": SERVED_NAME, **asked}
    asked["options"] = {"temperature": 0, "num_predict": WORDS}
    whole = client.chat(**asked)
    parts = list(client.chat(**asked, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [*[False] * (len(parts) - 1), True]
    assert parts[-1].done_reason == whole.done_reason
    assert parts[-1].eval_count == whole.eval_count
    return whole


def test_ollama(exact_server: Server) -> None:
    with ollama.Client(exact_server.url) as client:
        (listed,) = client.list().models
        (loaded,) = client.ps().models
        assert listed.model == loaded.model == f"{SERVED_NAME}:latest"
        shown = client.show(listed.model)
        assert shown.capabilities == ["completion", "tools"]
        assert shown.modelinfo["llama.context_length"] == loaded.context_length
        function = {"name": NAME, "arguments": {"city": "Oslo"}}
        messages: list[Any] = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "tool_calls": [{"function": function}]},
            {"role": "tool", "tool_name": NAME, "content": RESULT},
        ]
        told = ollama_turn(client, messages=messages, tools=[CHAT_TOOL])
        assert told.message.content
        assert told.done_reason in ("stop", "length")
        assert min(told.prompt_eval_duration, told.eval_duration) > 0
        messages += [told.message, {"role": "user", "content": "Say it as an object."}]
        formed = client.chat(SERVED_NAME, messages, format=Weather.model_json_schema())
        assert Weather.model_validate_json(formed.message.content)


def test_texts_of_ollama(exact_server: Server) -> None:
    with ollama.Client(exact_server.url) as client:
        options = {"temperature": 0, "num_predict": WORDS}
        asked: dict[str, Any] = {"model": f"{SERVED_NAME}:latest", "options": options}
        for prompt in ({"prompt": "Once upon a time", "raw": True}, {"prompt": QUESTION}):
            whole = client.generate(**asked, **prompt)
            parts = list(client.generate(**asked, **prompt, stream=True))
            assert whole.response
            assert "".join(part.response for part in parts) == whole.response
            assert parts[-1].context == whole.context
        assert whole.context
        again = client.generate(**asked, prompt="And tomorrow?", context=whole.context)
        assert again.prompt_eval_count > len(whole.context)
        assert client.pull(SERVED_NAME).status == "success"
        for refused, status in (
            (lambda: client.generate(**asked, prompt="a", suffix="b"), 400),
            (lambda: client.pull("another"), 403),
            (lambda: client.delete(SERVED_NAME), 403),
            (lambda: client.chat("another", [{"role": "user", "content": "x"}]), 404),
        ):
            with pytest.raises(ollama.ResponseError) as error:
                refused()
            assert error.value.status_code == status


# ---- images


@pytest.fixture(scope="module")
def image_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server with a tiny model that reads images."""
    folder = write_smolvlm(tmp_path_factory.mktemp("smolvlm"))
    with Server("--served-name", SERVED_NAME, model=str(folder)) as server:
        yield server


IMAGE = b64encode(picture(90, 60)).decode()
FEW = 4


def test_each_library_sends_an_image(image_server: Server) -> None:
    """The same image gives the same prompt and the same answer in each API."""
    url = f"data:image/png;base64,{IMAGE}"
    answers = []
    with openai.OpenAI(base_url=f"{image_server.url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = [{"type": "image_url", "image_url": {"url": url}}]
        chat = client.chat.completions.create(
            **CHAT, max_tokens=FEW, messages=[{"role": "user", "content": asked}]
        )
        answers.append(chat.choices[0].message.content)
        part: Any = [{"type": "input_image", "image_url": url, "detail": "auto"}]
        response = client.responses.create(
            **CHAT, max_output_tokens=16, input=[{"role": "user", "content": part}]
        )
        assert response.output_text.startswith(answers[0] or "?")
    source: Any = {"type": "base64", "media_type": "image/png", "data": IMAGE}
    with anthropic.Anthropic(base_url=image_server.url, api_key="none", max_retries=0) as sender:
        message = sender.messages.create(
            model=SERVED_NAME,
            max_tokens=FEW,
            messages=[{"role": "user", "content": [{"type": "image", "source": source}]}],
            extra_body={"temperature": 0},
        )
    answers += [block.text for block in message.content if block.type == "text"]
    drawn = {"role": "user", "content": "", "images": [IMAGE]}
    options = {"num_predict": FEW, "temperature": 0}
    with ollama.Client(host=image_server.url) as host:
        told = host.chat(model=SERVED_NAME, messages=[drawn], options=options)
    answers.append(told.message.content)
    assert len(answers) == 3
    assert answers[0]
    assert len(set(answers)) == 1
    assert chat.usage is not None
    used = message.usage
    cached = (used.cache_creation_input_tokens or 0) + (used.cache_read_input_tokens or 0)
    assert chat.usage.prompt_tokens == used.input_tokens + cached == told.prompt_eval_count
