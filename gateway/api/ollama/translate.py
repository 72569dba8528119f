"""Translates requests of Ollama's API into chats and completions, and field paths back.

Errors are InvalidRequest and name the fields of the client's request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gateway.api.ollama.requests import (
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaOptions,
)
from gateway.api.openai.checks import check_chat, check_completion
from gateway.api.openai.field_paths import translate_errors
from gateway.api.openai.requests import ChatBody, OpenEndedCompletion, unsupported
from gateway.api.openai.tools import is_hosted
from gateway.formats.model_format import ModelOutputFormat
from gateway.http.json_values import as_object, check_depth
from gateway.images.source import ImageSource
from protocol.wire.errors import InvalidRequest
from protocol.wire.field_words import one_of

ROLES = ("system", "user", "assistant", "tool")
EFFORTS = ("low", "medium", "high")
_SAME = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta"),
)
"""Options that a chat has under the same name."""
_PATHS = {
    r"^max_tokens$": "options.num_predict",
    r"^repetition_penalty$": "options.repeat_penalty",
    rf"^({'|'.join(_SAME)})\b": r"options.\1",
    r"^response_format\.json_schema\.schema\b": "format",
    r"^response_format\b": "format",
    r"^(enable_thinking|reasoning_effort)$": "think",
}
"""Pattern of a path in the chat or completion -> path in the client's request."""
_DURATION = re.compile(r"[+-]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h))+|[+-]?\d+")
"""Matches a duration as Go writes it, or a number of seconds."""
_ZERO = re.compile(r"[^1-9]*")


def request_path(name: str) -> str:
    """Translate a field path of the chat or completion into the field's path in the client's Ollama
    request, such as `max_tokens` into `options.num_predict`. Return any other path unchanged."""
    for pattern, own in _PATHS.items():
        name = re.sub(pattern, own, name)
    return name


def generated_path(name: str) -> str:
    """Translate a field path of a /api/generate request's chat into the path in the client's
    request. It is "prompt" for the chat's messages, otherwise that of `request_path`."""
    return "prompt" if name.startswith("messages") else request_path(name)


def unloads(keep_alive: float | str | None) -> bool:
    """Return whether `keep_alive` is zero, which asks to unload the model. Raise InvalidRequest if
    it is not a duration."""
    if isinstance(keep_alive, str):
        if keep_alive and not _DURATION.fullmatch(keep_alive):
            raise InvalidRequest.wrong(
                "keep_alive", 'a number of seconds, or a duration such as "5m"', keep_alive
            )
        return bool(keep_alive) and _ZERO.fullmatch(keep_alive) is not None
    return keep_alive == 0


# ---- chats


def chat_of(body: OllamaChatBody) -> ChatBody:
    """Return the chat that the body asks for. It must have messages."""
    for field in ("messages", "tools"):
        check_depth(getattr(body, field), field)
    _check_tools(body.tools or [])
    chat = ChatBody(
        messages=_messages(body.messages or []),
        tools=body.tools,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        **_shared(body),
    )
    with translate_errors(request_path):
        check_chat(chat)
    return chat


def _check_tools(tools: Sequence[Any]) -> None:
    """Raise InvalidRequest if a tool is not a function: an answer of this API cannot have a call of
    another tool."""
    for place, tool in enumerate(tools):
        kind = tool.get("type", "function") if isinstance(tool, Mapping) else "function"
        if kind != "function" and not is_hosted(tool):  # those are left out with a warning
            raise InvalidRequest.wrong(f"tools[{place}].type", one_of(("function",)), kind)


def prompted_chat(body: OllamaGenerateBody) -> ChatBody:
    """Return the chat of a body with a prompt that is neither raw nor has a suffix."""
    content: Any = body.prompt or ""
    if body.images:
        content = [{"type": "text", "text": content}, *_images(body.images, "images")]
    messages = [{"role": "user", "content": content}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    chat = ChatBody(
        messages=messages,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        **_shared(body),
    )
    with translate_errors(generated_path):
        check_chat(chat)
    return chat


def _shared(body: OllamaBody) -> dict[str, Any]:
    """Return the members of a chat that /api/chat and /api/generate have in common."""
    return {"model": body.model, "stream": body.stream is not False} | {
        **_options(body.options or OllamaOptions()),
        **_thinking(body.think),
        "response_format": _response_format(body.format),
    }


def _options(options: OllamaOptions) -> dict[str, Any]:
    limit = options.num_predict
    return {name: getattr(options, name) for name in _SAME} | {
        "max_tokens": None if limit is None or limit <= 0 else limit,
        "repetition_penalty": options.repeat_penalty,
    }


def _thinking(think: bool | str | None) -> dict[str, Any]:
    if isinstance(think, str):
        if think not in EFFORTS:
            raise InvalidRequest.wrong("think", f"true, false or {one_of(EFFORTS)}", think)
        return {"reasoning_effort": think}
    return {"enable_thinking": think}


def check_thinking(body: OllamaBody, output_format: ModelOutputFormat) -> None:
    """Raise InvalidRequest if the request wants thinking and the model does not think."""
    if body.think and output_format.reasoning is None:
        raise InvalidRequest.at("think", "this model does not support thinking")


def _response_format(value: Any) -> dict[str, Any] | None:
    check_depth(value, "format")
    if value is None or value == "":
        return None
    if value == "json":
        return {"type": "json_object"}
    if not isinstance(value, Mapping):
        raise InvalidRequest.wrong("format", '"json" or a JSON Schema', value)
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": value}}


def _messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat. Each has the same index as in the client's request.

    Ollama's tool calls often have no id, and a result then names only its tool. So calls get ids,
    and a result answers the first call of its tool that has no result yet. Some clients send the id
    with a result and not with its call. Such a result answers the first call that has none.
    """
    calls = _CallsWithoutResult()
    chat = []
    for place, message in enumerate(messages):
        at = f"messages[{place}]"
        message = as_object(message, at)
        if message.get("role") not in ROLES:
            raise InvalidRequest.wrong(f"{at}.role", one_of(ROLES), message.get("role"))
        content = message.get("content")
        if message.get("images"):
            text = [] if content is None else [{"type": "text", "text": content}]
            content = [*text, *_images(message["images"], f"{at}.images")]
        result = {"role": message["role"], "content": content}
        if message.get("thinking"):
            result["thinking"] = message["thinking"]
        if message.get("tool_calls"):
            result["tool_calls"] = calls.open(message["tool_calls"], place)
        if message["role"] == "tool":
            result |= calls.answer(message)
        chat.append(result)
    return chat


def _images(images: Any, at: str) -> list[ImageSource]:
    """Return the images of a message, which are in base64. Raise InvalidRequest."""
    if not isinstance(images, list):
        raise InvalidRequest.wrong(at, "a list of images in base64", images)
    found = []
    for place, image in enumerate(images):
        if not isinstance(image, str):
            raise InvalidRequest.wrong(f"{at}[{place}]", "an image in base64", image)
        is_url = image.startswith("data:")
        found.append(
            ImageSource(
                f"{at}[{place}]",
                base64="" if is_url else image,
                url=image if is_url else "",
                kind_at=at,
            )
        )
    return found


class _CallWithoutResult(NamedTuple):
    """A call without a result. `is_named` is whether the client sent its id."""

    name: Any  # checked with the chat
    id: Any
    is_named: bool


class _CallsWithoutResult:
    """The calls of a conversation that have no result yet: those of the last turn with calls."""

    def __init__(self) -> None:
        self._open: list[_CallWithoutResult] = []
        #: Whether the client has sent an id with any call.
        self._has_ids = False

    def open(self, calls: Any, place: int) -> list[dict[str, Any]]:
        """Return the calls of the message at index `place` as a chat has them."""
        at = f"messages[{place}].tool_calls"
        if not isinstance(calls, list):
            raise InvalidRequest.wrong(at, "a list", calls)
        made = []
        self._open = []
        for index, call in enumerate(calls):
            call = as_object(call, f"{at}[{index}]")
            function = as_object(call.get("function"), f"{at}[{index}].function")
            arguments = function.get("arguments")
            if arguments is not None and not isinstance(arguments, Mapping):
                raise InvalidRequest.wrong(
                    f"{at}[{index}].function.arguments", "an object", arguments
                )
            own_id, name = call.get("id"), function.get("name")
            call_id = own_id or f"call_{place}_{index}"
            self._open.append(_CallWithoutResult(name, call_id, bool(own_id)))
            self._has_ids = self._has_ids or bool(own_id)
            called = {"name": name, "arguments": arguments or {}}
            made.append({"id": call_id, "type": "function", "function": called})
        return made

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the members of a tool message that say which call it answers. That call is then
        closed."""
        own_id = message.get("tool_call_id")
        name = message.get("tool_name") or message.get("name")
        found = self._answered(own_id, name)
        if found is not None:
            self._open.remove(found)
            return {"tool_call_id": found.id, "name": found.name}
        is_checked = self._has_ids or not isinstance(own_id, str)
        members = {"tool_call_id": own_id if is_checked else None, "name": name}
        return {key: value for key, value in members.items() if value is not None}

    def _answered(self, own_id: Any, name: Any) -> _CallWithoutResult | None:
        """Return the call with the id `own_id`. If a client sends ids with results only, return the
        first call of the tool `name`, or else the first one."""
        if own_id:
            for call in self._open:
                if call.id == own_id:
                    return call
        unnamed = [call for call in self._open if not (own_id and call.is_named)]
        by_name = [call for call in unnamed if name in (None, call.name)]
        if by_name:
            return by_name[0]
        return unnamed[0] if own_id and unnamed else None


# ---- texts


def completion_of(body: OllamaGenerateBody) -> OpenEndedCompletion:
    """Return the completion of a body that is raw or has a suffix."""
    kind = "raw" if body.raw else "suffix"
    for field in ("system", "context"):
        if getattr(body, field):
            raise InvalidRequest.at(field, f"not available with {kind}")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    completion = OpenEndedCompletion(
        prompt=body.prompt or "",
        suffix=body.suffix,
        logprobs=num_logprobs,
        model=body.model,
        stream=body.stream is not False,
        response_format=_response_format(body.format),
        **_options(body.options or OllamaOptions()),
    )
    with translate_errors(request_path):
        check_completion(completion)
    return completion


def check_generate(body: OllamaGenerateBody) -> None:
    """Raise InvalidRequest if a field of the body is not supported."""
    if body.images and (body.raw or body.suffix):
        raise InvalidRequest.at("images", "a prompt without the chat template has no images")
    if body.template:
        raise unsupported("template", "the operator sets it with --chat-template")
