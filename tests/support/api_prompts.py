"""One conversation in the form of each API, and the prompt that a request with it gets.

A conversation is a list of chat messages in OpenAI's form. The prompt is made by the product's own
code: the body is decoded, checked, translated and rendered as for a request over HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from gateway.api.anthropic.requests import MessagesBody
from gateway.api.anthropic.translate import translate
from gateway.api.ollama.requests import OllamaChatBody
from gateway.api.ollama.translate import chat_of
from gateway.api.openai.checks import check_chat
from gateway.api.openai.prepare import Preparation
from gateway.api.openai.requests import ChatBody
from gateway.api.responses.items import input_items
from gateway.api.responses.requests import ResponsesBody
from gateway.api.responses.translate import rendered
from gateway.images.source import no_files
from gateway.served_model import ServedModel

Message = Mapping[str, Any]
Tool = Mapping[str, Any]


def text_of(content: Any) -> str:
    """Return the content of a message as one text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content)


def _reasoning(message: Message) -> str | None:
    found = message.get("reasoning") or message.get("reasoning_content")
    return None if found is None else str(found)


def _blocks(content: Any) -> list[dict[str, Any]]:
    """Return the content as text blocks of Anthropic's API."""
    texts = [content or ""] if isinstance(content, str | None) else [p["text"] for p in content]
    return [{"type": "text", "text": text} for text in texts if text]


# ---- bodies


def chat_body(messages: Sequence[Message], tools: Sequence[Tool] | None) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **({"tools": tools} if tools else {})}


def messages_body(messages: Sequence[Message], tools: Sequence[Tool] | None) -> dict[str, Any]:
    """Return the body of POST /v1/messages. System messages at the start are its `system`."""
    rest = list(messages)
    system: list[dict[str, Any]] = []
    while rest and rest[0]["role"] in ("system", "developer"):
        system += _blocks(rest.pop(0)["content"])
    turns: list[dict[str, Any]] = []
    for message in rest:
        role = message["role"]
        blocks = _blocks(message.get("content"))
        if role == "tool":
            result = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
            role, blocks = "user", [{**result, "content": blocks}]
        elif role == "assistant":
            reasoning = _reasoning(message)
            thinking = [{"type": "thinking", "thinking": reasoning, "signature": "s"}]
            blocks = [*(thinking if reasoning else []), *blocks]
            blocks += [_tool_use(call) for call in message.get("tool_calls") or ()]
        role = "system" if role == "developer" else role
        if turns and turns[-1]["role"] == role:  # results of one turn are in one message
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    own_tools = [
        {
            "name": tool["function"]["name"],
            "input_schema": tool["function"].get("parameters", {"type": "object"}),
            **{k: v for k, v in tool["function"].items() if k == "description"},
        }
        for tool in tools or ()
    ]
    return {
        **{"model": "m", "max_tokens": 8, "messages": turns},
        **({"system": system} if system else {}),
        **({"tools": own_tools} if own_tools else {}),
    }


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call as the block that this API's answer has for it."""
    arguments = call["function"]["arguments"]
    value = None
    with suppress(msgspec.DecodeError):
        value = msgspec.json.decode(arguments)
    if not isinstance(value, dict):
        value = {"INVALID_JSON": arguments}
    own = {"id": call["id"], "name": call["function"]["name"]}
    return {"type": "tool_use", **own, "input": value}


def responses_body(messages: Sequence[Message], tools: Sequence[Tool] | None) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"]
        kind = "output_text" if role == "assistant" else "input_text"
        texts = [part["text"] for part in _blocks(message.get("content"))]
        parts = [{"type": kind, "text": text} for text in texts]
        if role == "tool":
            output = {"type": "function_call_output", "call_id": message["tool_call_id"]}
            items.append({**output, "output": parts or ""})
            continue
        if reasoning := _reasoning(message):
            thought = [{"type": "reasoning_text", "text": reasoning}]
            items.append({"type": "reasoning", "summary": [], "content": thought})
        if parts or role != "assistant":
            items.append({"type": "message", "role": role, "content": parts})
        for call in message.get("tool_calls") or ():
            own = {"call_id": call["id"], **call["function"]}
            items.append({"type": "function_call", **own})
    own_tools = [{"type": "function", **tool["function"]} for tool in tools or ()]
    return {"model": "m", "input": items, **({"tools": own_tools} if own_tools else {})}


def ollama_body(messages: Sequence[Message], tools: Sequence[Tool] | None) -> dict[str, Any]:
    turns = []
    for message in messages:
        role = "system" if message["role"] == "developer" else message["role"]
        turn: dict[str, Any] = {"role": role, "content": text_of(message.get("content"))}
        if reasoning := _reasoning(message):
            turn["thinking"] = reasoning
        if calls := message.get("tool_calls"):
            turn["tool_calls"] = [_ollama_call(call) for call in calls]
        if role == "tool":
            turn["tool_call_id"] = message["tool_call_id"]
        turns.append(turn)
    return {"model": "m", "messages": turns, **({"tools": tools} if tools else {})}


def _ollama_call(call: Mapping[str, Any]) -> dict[str, Any]:
    block = _tool_use(call)
    function = {"name": block["name"], "arguments": block["input"]}
    return {"id": block["id"], "function": function}


BODIES: Mapping[str, Callable[[Sequence[Message], Sequence[Tool] | None], dict[str, Any]]] = {
    "chat": chat_body,
    "messages": messages_body,
    "responses": responses_body,
    "ollama": ollama_body,
}
"""API -> the body of a request with a conversation and tools."""


# ---- prompts


def prompt_of(api: str, body: Mapping[str, Any], model: ServedModel) -> str:
    """Return the prompt of a request. Raise InvalidRequest if the request is refused."""
    data = msgspec.json.encode(body)
    match api:
        case "chat":
            chat = msgspec.json.decode(data, type=ChatBody)
            check_chat(chat)
        case "messages":
            translation = translate(msgspec.json.decode(data, type=MessagesBody))
            with translation.translate_errors():
                preparation = Preparation(
                    translation.chat, model, shown_tools=translation.shown_tools
                )
                return preparation.prompt(translation.chat.messages).text
        case "responses":
            responses = msgspec.json.decode(data, type=ResponsesBody)
            items = input_items(responses.input)
            ready = rendered(responses, items, model, trusts_template=False, files=no_files)
            return ready.prompt.text
        case "ollama":
            chat = chat_of(msgspec.json.decode(data, type=OllamaChatBody))
        case _:
            raise ValueError(api)
    return Preparation(chat, model).prompt(chat.messages).text
